"""The page of a server, in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from playwright.sync_api import expect

import ingot
from ingot import RunningServer
from ingot.model_store import Store
from tests import onnx_models
from tests.browsers import Opened, on_a_phone
from tests.server.access.served import make_key
from tests.serving.rolling import load, times
from tests.support import RunIngot, succeeded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    models = onnx_models.affine(folder), f"other={onnx_models.affine(folder)}", onnx_models.picture(folder)
    with ingot.serve(*models, http_port=0, grpc_port=0) as running:
        yield running


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Opened]:
    with on_a_phone(browser, server.http_url) as found:
        yield found


def infer(server: RunningServer, count: int, width: int = 3) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, width], "data": [1.0] * width}
    with httpx.Client(trust_env=False, timeout=60) as client:
        for _ in range(count):
            client.post(f"{server.http_url}/v2/models/affine/infer", json={"inputs": [tensor]})


@pytest.mark.matrix
def test_it_loads_and_its_charts_move_under_load(opened: Opened, server: RunningServer) -> None:
    page = opened.page
    assert page.url.endswith("/ui")
    expect(page.locator("#status")).to_have_text("Live: 3 models")
    expect(page.locator("#models tbody tr")).to_have_count(3)
    rate = page.locator("[data-chart='Requests per second'] .value")
    expect(rate).to_have_text("0")
    infer(server, 200)
    expect(rate).not_to_have_text("0")
    expect(page.locator("#stages")).to_contain_text("compute")
    expect(page.locator("#stages span").last).to_have_text(re.compile("[1-9].* (µs|ms|s)"))
    expect(page.locator("#batches rect.bar").first).to_be_attached()
    assert page.locator("[data-chart='Requests per second'] path").get_attribute("d")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    assert opened.faults == []


@pytest.mark.matrix
def test_errors_show(opened: Opened, server: RunningServer) -> None:
    infer(server, 3, width=4)
    expect(opened.page.locator("#errors")).to_contain_text("http: invalid argument")


def test_json_is_answered_by_all_models_with_the_same_inputs(opened: Opened) -> None:
    page = opened.page
    page.get_by_label("x as JSON").fill("[1, 2, 3]")
    page.get_by_role("button", name="Ask the model").click()
    answers = page.locator(".answer")
    expect(answers).to_have_count(2)
    expect(answers.first).to_contain_text("affine:1")
    expect(answers.first.locator("[data-top]").first).to_have_text("2")
    page.get_by_label("x as JSON").fill("[1, 2")
    page.get_by_role("button", name="Ask the model").click()
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    page.get_by_label("x as JSON").fill('["a", "b", "c"]')
    page.get_by_role("button", name="Ask the model").click()
    expect(page.get_by_role("alert").first).to_contain_text("tensor 'x'")


def test_a_npy_file_is_answered(opened: Opened, tmp_path: Path) -> None:
    page, path = opened.page, tmp_path / "x.npy"
    np.save(path, np.array([[0, 0, 5], [9, 0, 0]], np.float32))
    page.get_by_label("x from a .npy file").set_input_files(path)
    expect(page.get_by_label("x as JSON")).to_have_value("[0,0,5,9,0,0]")
    page.get_by_role("button", name="Ask the model").click()
    expect(page.locator(".answer code").first).to_have_text("[1,1,11,19,1,1]")


def test_a_drawing_is_answered(opened: Opened) -> None:
    page = opened.page
    page.get_by_role("button", name="picture:1").press("Enter")
    canvas = page.locator("canvas")
    expect(canvas).to_have_attribute("width", "8")
    canvas.focus()
    for key in ("ArrowUp", "ArrowUp", " "):
        canvas.press(key)
    page.get_by_role("button", name="Ask the model").click()
    expect(page.locator(".answer [data-top]")).to_have_text("2")  # the row above the middle that was drawn in
    assert opened.faults == []


def test_the_form_comes_first_and_an_idle_chart_has_no_scale(opened: Opened) -> None:
    page = opened.page
    expect(page.locator("#inputs textarea")).to_be_attached()
    expect(page.locator("[data-chart]").first).to_be_attached()
    form, charts = (page.locator(name).evaluate("each => each.offsetTop") for name in ("#try", "#charts"))
    assert form < charts
    assert "0.0010" not in page.locator("#charts").inner_text()
    table = page.locator("#models").evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")
    assert table  # no column is cut at 390 pixels


@pytest.mark.matrix
def test_what_is_copied_runs(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    page.get_by_label("x as JSON").fill("[1, 2, 3]")
    for kind, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        page.get_by_role("button", name=f"copy as {kind}").click()
        code = page.locator("#copied code")
        expect(code).to_contain_text("curl -s" if kind == "curl" else "import ingot")
        done = subprocess.run([*command, code.inner_text()], capture_output=True, text=True, check=True)
        assert re.search(r"3\.?0?, *5\.?0?, *7", done.stdout), done.stdout


def test_a_picture_is_answered(browser: Any, tmp_path: Path) -> None:
    """An image in colours that is not drawn: the mean of each channel of a red picture, and zeros up to 70 classes."""
    axes = numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    ends = numpy_helper.from_array(np.array([0, 0, 0, 67], np.int64), "ends")
    mean = helper.make_node("ReduceMean", ["image", "axes"], ["mean"], keepdims=0)
    nodes, weights = [mean, helper.make_node("Pad", ["mean", "ends"], ["y"])], [axes, ends]
    inputs: Any = [("image", TensorProto.FLOAT, ("batch", 3, 32, 32))]
    model = onnx_models.save(tmp_path / "mean.onnx", nodes, inputs, [("y", TensorProto.FLOAT, ("batch", 70))], weights)
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(["red <b>", "green", "blue", *(f"none {n}" for n in range(67))]))
    Image.new("RGB", (90, 60), (255, 0, 51)).save(tmp_path / "red.png")
    (tmp_path / "notes.png").write_bytes(b"hello")
    with ingot.serve(model, http_port=0, grpc_port=0, labels=labels) as running:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        opened = Opened(page, running.http_url)
        expect(page.get_by_label("image as JSON")).to_be_hidden()  # not 3,072 zeros
        page.get_by_label("image from a picture").set_input_files(tmp_path / "red.png")
        expect(page.locator("#inputs canvas")).to_have_attribute("width", "32")
        page.get_by_role("button", name="Ask the model").click()
        expect(page.locator(".answer .big")).to_have_text("red <b>")
        scores = page.locator(".answer .scores span")
        expect(scores).to_have_count(20)  # the ten largest of 70, with their names
        assert scores.all_inner_texts()[:5] == ["red <b>", "1.00", "blue", "0.200", "green"]
        page.get_by_label("image from a picture").set_input_files(tmp_path / "notes.png")
        expect(page.locator("[aria-label='image from a picture']")).to_have_js_property(
            "validationMessage", "This is not a picture that the browser can show."
        )
        assert opened.faults == []
        page.close()


@pytest.mark.matrix
def test_a_candidate_that_is_tried_shows(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ingot: RunIngot
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    store = Store(tmp_path / "store")
    for version, factor in ((1, 1.0), (2, 1.0005), (3, 1.1)):
        store.push(times(factor), f"times:{version}")
    store.promote("times:1", "prod")
    plan: dict[str, Any] = {"canary": "20", "canary_every": "1h", "canary_compare": 100}
    with ingot.serve("times:prod", store=store, http_port=0, grpc_port=0, **plan) as running:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.set_default_timeout(30_000)
        opened = Opened(page, running.http_url)
        expect(page.locator("#models tbody")).to_contain_text("ready")
        expect(page.locator("#canary")).to_be_hidden()
        with load([running.http_url]):
            store.promote("times:2", "prod")
            expect(page.locator("#canary h3")).to_have_text("Canary")
            rows = page.locator("#canary dd")
            expect(rows.nth(0)).to_have_text("20 %")
            expect(rows.nth(2)).to_have_text(re.compile("[1-9][0-9,.]* agreed, 0 differed"))
            expect(rows.nth(3)).to_have_text("0.00050")
            expect(page.locator("#models tbody")).to_contain_text("canary 20 %")
            succeeded(run_ingot("server", "canary", "times", "--stop"))
            expect(page.locator("#canary")).to_be_hidden()
            succeeded(run_ingot("server", "shadow", "times", "times:3", "--compare", "100"))
            expect(page.locator("#canary h3")).to_have_text("Shadow")
            expect(rows.nth(0)).to_contain_text("answers copies")
            expect(rows.nth(2)).to_have_text(re.compile("^0 agreed, [1-9][0-9,.]* differed"))
            expect(rows.nth(2)).to_have_class("bad")
            expect(rows.nth(3)).to_have_text("0.10")
            succeeded(run_ingot("server", "canary", "times", "--drift", "1"))
            expect(page.locator("#models tbody")).to_contain_text("update failed")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.faults == []
        page.close()


def test_a_key_is_asked_for_where_one_is_needed(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    token = make_key(path, "infer", "metrics")
    with ingot.serve(onnx_models.affine(tmp_path), http_port=0, grpc_port=0, auth=path) as running:
        page = browser.new_page()
        page.goto(running.http_url)
        page.get_by_label("API key").fill(token)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#status")).to_have_text("Live: 1 model")
        page.close()


@pytest.mark.matrix
def test_it_is_on_the_management_port_and_can_be_turned_off(tmp_path: Path) -> None:
    model = onnx_models.affine(tmp_path)
    with ingot.serve(model, http_port=0, grpc_port=0, page=False) as running:
        assert httpx.get(f"{running.http_url}/ui", trust_env=False).status_code == 404
    with ingot.serve(model, http_port=0, grpc_port=0, management="127.0.0.1:0", insecure=True) as running:
        assert httpx.get(f"{running.http_url}/ui", trust_env=False).status_code == 404
        url = running._server.management.url  # type: ignore[union-attr]  # which is open
        answer = httpx.get(f"{url}/ui", trust_env=False)
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<script>" not in answer.text
    assert " style=" not in answer.text
