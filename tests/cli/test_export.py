"""``ingot export`` from the shell: its views into a model, and cleaning up after itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.model_store import Archive, BlobFolder, add_variant
from ingot.model_store.format import manifest
from tests import onnx_models
from tests.model_store import samples
from tests.support import ROOT, RequireTool, RunIngot

ROWS = "x:float32[batch,4]"


def test_the_report_travels_in_the_archive(run_ingot: RunIngot, tmp_path: Path) -> None:
    out = tmp_path / "net.ingot"
    assert run_ingot("export", "tests.export.models:net", "--input", ROWS, "--out", out).returncode == 0
    for suffix in ("html", "json", "txt"):
        result = run_ingot("inspect", out, "--report", tmp_path / f"net.{suffix}")
        assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "net.json").read_text())
    assert report["attempts"] == [{"route": "export", "failure": ""}]
    assert {stage["name"] for stage in report["stages"]} >= {"probe", "capture", "lower", "pack"}
    assert next(graph["title"] for graph in report["graphs"]) == "FX graph as captured"
    HTMLParser().feed((tmp_path / "net.html").read_text())
    assert "aten.linear.default" in (tmp_path / "net.html").read_text()
    assert "aten.linear.default" in (tmp_path / "net.txt").read_text()


@pytest.mark.matrix
def test_labels_among_the_example_inputs_are_named_and_not_used(run_ingot: RunIngot, tmp_path: Path) -> None:
    """The same file goes to ``ingot quantize --calibrate``."""
    data = tmp_path / "data.npz"
    np.savez(data, x=np.ones((6, 4), np.float32), labels=np.arange(6), weight=np.float32(1))
    out = tmp_path / "net.ingot"
    told = ["note: 'labels' in the example is not an input: it is not used", "note: 'weight' in the example"]
    result = run_ingot("export", "tests.export.models:net", "--input", ROWS, "--example", data, "--out", out)
    assert result.returncode == 0, result.stderr
    assert all(remark in result.stderr for remark in told)
    planned = run_ingot("export", "tests.export.models:net", "--example", data, "--plan")
    assert all(remark in planned.stdout for remark in told)
    np.savez(data, x=np.ones((6, 3), np.float32), labels=np.arange(6), weight=np.float32(1))
    result = run_ingot("export", onnx_models.affine(tmp_path), "--example", data, "--out", out)
    assert result.returncode == 0, result.stderr
    assert all(remark in result.stderr for remark in told)

    np.savez(data, y=np.ones((6, 4), np.float32), labels=np.arange(6))
    result = run_ingot("export", "tests.export.models:net", "--example", data, "--out", out)
    assert result.returncode == 1
    assert "does not run on the example inputs (y [6, 4], labels [6])" in result.stderr


def test_a_report_of_another_kind_is_refused(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    result = run_ingot("inspect", digits_archive, "--report", tmp_path / "a.pdf")
    assert result.returncode == 1
    assert "a report cannot be written as a.pdf; end its name in .html, .json, .txt" in result.stderr


EVIL = "<script>alert(1)</script>\x1b]0;owned\x07"


def reported(path: Path, **documents: bytes) -> Path:
    """Write an archive with these documents as its report, by their suffix."""
    blobs = BlobFolder.scratch()
    files = {f"report.{suffix}": content for suffix, content in documents.items()}
    graph = blobs.put(b"a graph", manifest.WEIGHT)
    Archive.create(blobs, [add_variant(blobs, samples.serving(), graph, [], [], files)]).save(path)
    return path


def test_nothing_of_a_hostile_report_reaches_the_file_as_it_is(run_ingot: RunIngot, tmp_path: Path) -> None:
    data = {"name": EVIL, "source": EVIL, "created": EVIL, "notes": [EVIL], "foreign": EVIL}
    graph = {"title": EVIL, "nodes": [], "operators": {EVIL: 0}}
    raw = json.dumps({**data, "graphs": [graph], "sizes": {EVIL: 1}}).encode()
    archive = reported(tmp_path / "evil.ingot", json=raw, html=EVIL.encode(), txt=EVIL.encode())
    for suffix in ("html", "json", "txt"):
        result = run_ingot("inspect", archive, "--report", tmp_path / f"a.{suffix}")
        assert result.returncode == 0, result.stderr
        shown = (tmp_path / f"a.{suffix}").read_text()
        assert "owned" in shown
        assert not {"\x1b", "\x07"} & set(shown)
        assert suffix != "html" or "<script" not in shown
    assert "foreign" not in json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({"html": b"<p>"}, "the archive carries no report.json; export the model again"),
        ({"json": b"[]", "html": b"<p>"}, "the report.json of variant 'fp32' is not valid"),
        (
            {"json": b'{"name":"a","source":"b","created":"c","sizes":{"graph":1' + b"0" * 400 + b"}}"},
            "the report.json of variant 'fp32' is not valid at 'sizes.graph'",
        ),
        ({"json": b" " * (16 << 20) + b"{}"}, "the report.json of variant 'fp32' is larger than 16 MiB"),
    ],
)
def test_an_invalid_report_leaves_the_file_unchanged(
    run_ingot: RunIngot, tmp_path: Path, documents: dict[str, bytes], message: str
) -> None:
    (tmp_path / "a.html").write_text("before")
    archive = reported(tmp_path / "a.ingot", **documents)
    result = run_ingot("inspect", archive, "--report", tmp_path / "a.html")
    assert result.returncode == 1
    assert message in result.stderr
    assert (tmp_path / "a.html").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.matrix
def test_the_plan_needs_no_place_for_an_archive(run_ingot: RunIngot) -> None:
    result = run_ingot("export", "tests.export.models:net", "--input", ROWS, "--plan", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["weights"]


@pytest.mark.matrix
def test_bisecting_a_sound_model_finds_nothing(run_ingot: RunIngot) -> None:
    result = run_ingot("export", "tests.export.models:net", "--input", ROWS, "--bisect", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["departure"] is None
    assert found["cases"] > 4


@pytest.mark.matrix
def test_a_failure_shows_the_line_and_an_edit(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", "tests.export.models:Branch", "--input", ROWS, "--out", tmp_path / "a.ingot")
    assert result.returncode == 1
    assert "if x.sum() > 0:" in result.stderr
    assert "torch.cond(x.sum() > 0" in result.stderr
    assert not (tmp_path / "a.ingot").exists()


@pytest.mark.matrix
def test_settings_of_the_server_are_in_the_archive(run_ingot: RunIngot, tmp_path: Path) -> None:
    model, out, labels = onnx_models.running_sum(tmp_path), tmp_path / "sum.ingot", tmp_path / "labels.json"
    labels.write_text('["a", "b", "c"]')
    settings = ("--states", "total=total_next,past=past_next", "--labels", labels)
    specs = [f"{name}:float32[batch,{seen}3]" for name, seen in (("x", ""), ("total", ""), ("past", "seen=0..,"))]
    inputs = [part for spec in specs for part in ("--input", spec)]
    result = run_ingot("export", model, "--out", out, *inputs, *settings)
    assert result.returncode == 0, result.stderr
    shown = run_ingot("inspect", out).stdout
    assert " states  total=total_next,past=past_next\n labels  3 names of classes\n" in shown
    with ingot.serve(str(out), http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:
        metadata = client.metadata("running_sum")
        assert [spec["name"] for spec in metadata["inputs"]] == ["x"]
        assert metadata["labels"] == ["a", "b", "c"]
        x = np.ones((1, 3), np.float32)
        for step in range(2):
            parameters = {"sequence_id": 7, "sequence_start": step == 0}
            assert (
                client.infer("running_sum", {"x": x}, parameters=parameters)["y"].tolist() == ((step + 1) * x).tolist()
            )
    other = ("--states", "total=total_next,past=past_next,x=@start")
    with ingot.serve(str(out), http_port=0, grpc_port=0, states="total=total_next") as server:  # the server's wins
        assert {spec["name"] for spec in ingot.Client(server.http_url).metadata("running_sum")["inputs"]} == {
            "x",
            "past",
        }
    for wrong, says in (
        (("--states", "total=none"), "no output 'none' for the state 'total=none'"),
        (("--states", "total"), "no pairs of an input and an output"),
        (("--states", "x=@begin"), "'@begin' is not a control; there are @start, @end and @ready"),
        (("--repeat", "x=none"), "--repeat x=none"),
        (other, "no inputs or no outputs except its states"),
    ):
        result = run_ingot("export", model, "--out", tmp_path / "wrong.ingot", *inputs, *wrong)
        assert result.returncode == 1
        assert says in result.stderr


@pytest.mark.long
def test_explain_looks_further_and_needs_no_place_for_an_archive(run_ingot: RunIngot) -> None:
    result = run_ingot("export", "tests.export.models:Branch", "--input", ROWS, "--explain")
    assert result.returncode == 1
    assert "the condition:" in result.stderr
    assert "Remedy: use torch.where or torch.cond" in result.stderr


@pytest.mark.parametrize("constant", ["flag", "=1"])
def test_a_malformed_constant(run_ingot: RunIngot, tmp_path: Path, constant: str) -> None:
    result = run_ingot(
        "export", "tests.export.models:net", "--input", ROWS, "--constant", constant, "--out", tmp_path / "a.ingot"
    )
    assert result.returncode == 1
    assert f"'{constant}' is not a constant; write name=value" in result.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--explain-limit", "-5"], "--explain-limit is -5; it must be a number of seconds above 0"),
        (["--explain-limit", "nan"], "--explain-limit is nan; it must be"),
        (["--opset", "-1"], "cannot export to operator set -1; give --opset from 7 to "),
        (["--opset", "6"], "cannot export to operator set 6"),
        (["--opset", "999"], "cannot export to operator set 999"),
    ],
)
def test_numbers_out_of_range_are_refused_before_any_work(
    run_ingot: RunIngot, tmp_path: Path, option: list[str], message: str
) -> None:
    result = run_ingot("export", "no_such_module:Net", "--out", tmp_path / "a.ingot", *option)
    assert result.returncode == 1
    assert f"error: {message}" in result.stderr


ENDING = """
import torch

class Ending(torch.nn.Module):
    def forward(self, x):
        raise SystemExit(3)
"""


def test_a_model_that_ends_the_process_is_reported(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    result = run_ingot("export", "ending:Ending", "--input", ROWS, "--out", tmp_path / "a.ingot")
    assert result.returncode == 1
    assert "the model does not run on the example inputs" in result.stderr
    assert "the code ends the process (SystemExit: 3); let it return, or raise another exception" in result.stderr


NOISY = """
import logging
import torch

for name in ("torch.utils._pytree", "torch.onnx", "torchao", "torchao.ops", "my_model"):
    logging.getLogger(name).warning("warning of %s", name)
logging.getLogger("torch.onnx").error("error of torch.onnx")
"""


@pytest.mark.matrix
def test_warnings_of_other_packages_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    command = [sys.executable, "-m", "ingot", "export", "noisy:Net", "--input", ROWS, "--out", "a.ingot"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stderr.splitlines()
    assert [line.rpartition("] ")[2] for line in shown[:-1]] == ["warning of my_model", "error of torch.onnx"]
    assert shown[-1].startswith("error: 'noisy' has no attribute 'Net'"), shown


SLOW = """
import time
import torch

class Slow(torch.nn.Module):
    def forward(self, x):
        print("running", flush=True)
        time.sleep(0.5)
        return x * 2
"""


@pytest.mark.matrix
def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ingot", "export", "slow:Slow", "--input", ROWS, "--out", "slow.ingot"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(3):  # in the middle of the proof
            assert process.stdout.readline() == "running\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert not (tmp_path / "slow.ingot").exists()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("ingot-")] == []


@pytest.mark.long
def test_an_interrupted_compilation_leaves_no_files(tmp_path: Path, require_tool: RequireTool) -> None:
    require_tool("g++")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ingot", "export", "tests.export.models:net", "--input", ROWS, "--to", "aoti"]
    # In its own process group, all of which Ctrl-C ends, the compiler included.
    with subprocess.Popen(
        [*command, "--out", "a.ingot"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        while process.poll() is None and not any(temporary.rglob("cc*.s")):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
