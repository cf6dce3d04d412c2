"""``ingot deploy capacity`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import ingot
from ingot.model_store import Archive
from tests.support import RunIngot, refused, succeeded

SLO = ("--slo", "p99=20ms")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate fewer requests."""
    monkeypatch.setattr("ingot.deploy.capacity.server._LEAST", 1000)
    monkeypatch.setattr("ingot.deploy.capacity.server._MOST", 2000)


@pytest.mark.matrix
def test_a_plan_from_the_latencies_of_the_archive(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    done = run_ingot(
        *("deploy", "capacity", f"{digits_archive}#int8", "--rate", "50000", *SLO),
        *("--cores", "1", "--cost", "0.25/h", "--report", "plan.html"),
    )
    said = succeeded(done)
    for part in ("digits", "#int8: 50,000 requests per second", "capacity of a replica", "one replica lost", "cost"):
        assert part in said
    assert "the event loop shares the engine's cores" in said
    assert "a constant for small requests, binary" in said
    page = (tmp_path / "plan.html").read_text()
    assert "objective: p99" in page
    assert "<polyline" in page


@pytest.mark.matrix
def test_a_plan_for_programs(run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("".join(f"{number / 200}\n" for number in range(1000)))
    command = ("deploy", "capacity", digits_fp32, *SLO, "--arrivals", times, "--overhead", "60us", "--json")
    plan = json.loads(succeeded(run_ingot(*command)))
    [latency, *_] = Archive.open(digits_fp32).variant().serving.evidence.latency
    assert plan["rate"] == pytest.approx(200, rel=0.01)
    assert plan["replicas"] == 1
    assert plan["one_lost"] is None
    assert plan["replica"]["overhead"] == pytest.approx({"request": 60e-6, "call": 0.0, "wakeup": 0.0, "wire": 0.0})
    assert plan["replica"]["latency"]["1"] == latency.seconds
    assert plan["each"]["p50"] < plan["each"]["p99"] < 0.02
    more = json.loads(succeeded(run_ingot(*command, "--rate", "100000")))
    assert more["rate"] == 100_000
    assert more["replicas"] > 1


@pytest.mark.matrix
def test_latencies_of_another_machine_are_named(
    run_ingot: RunIngot, digits_fp32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.runtime.machine.devices.cpu_features", lambda: "x86_64 amx_int8")
    done = run_ingot("deploy", "capacity", digits_fp32, "--rate", "10", *SLO)
    succeeded(done)
    assert "recorded on another machine" in done.stderr
    assert "--measure measures on this one" in done.stderr


@pytest.mark.matrix
def test_a_plan_from_measurements_here(run_ingot: RunIngot, digits_fp32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.deploy.capacity.calibration._SECONDS", 1)
    command = (
        "deploy",
        "capacity",
        digits_fp32,
        "--rate",
        "10",
        "--slo",
        "p50=200ms",
        "--measure",
        "--cores",
        "1",
        "--json",
    )
    plan = json.loads(succeeded(run_ingot(*command)))
    assert plan["profile"].startswith("measured now on ")
    assert list(plan["replica"]["latency"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert plan["replica"]["engine_threads"] == 1
    assert plan["replica"]["overhead"]["request"] > 0
    assert 10 < plan["replica"]["capacity"] < plan["replica"]["ceiling"] < 1e6


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0", *SLO], "--rate 0 is not a rate"),
        (SLO, "--rate is missing"),
        (["--rate", "9", "--slo", "20ms"], "write it as p99=50ms"),
        (["--rate", "9", "--slo", "p99=5us"], "which is the fastest possible"),
        (["--rate", "9", *SLO, "--cost", "much"], "write it as 0.25/h"),
        (["--rate", "9", *SLO, "--overhead", "much"], "--overhead 'much' is not a duration"),
        (["--rate", "9", *SLO, "--overhead", "5s"], "must be over 0 and under 1 s"),
        (["--rate", "9", *SLO, "--overhead", "5us", "--measure"], "leave --overhead out"),
        (["--rate", "9", *SLO, "--device", "cuda"], "were recorded on cpu, not on cuda; --measure"),
        (["--rate", "9", *SLO, "--cores", "1024", "--measure"], "--cores 1024 cannot be measured here"),
        (["--rate", "9", *SLO, "--arrivals", "nope"], "nope cannot be read"),
        (["--rate", "9", *SLO, "--arrivals", "odd"], "odd holds no times from 0 to 86400 seconds"),
        (["--rate", "9", *SLO, "--variant", "int8"], "has no variant 'int8'"),
        (["--rate", "9", *SLO, "--report", "no/such/folder.html"], "no/such"),
    ],
)
def test_mistakes(run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "odd").write_text("1\n,\nnan\n2\n")
    done = run_ingot("deploy", "capacity", digits_fp32, *arguments)
    # With --measure, progress comes before the error.
    done.stderr = done.stderr.removeprefix("Opening\n")
    assert message in refused(done)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare graph of two inputs of dynamic length as an archive: y = ids * mask."""
    folder = tmp_path_factory.mktemp("words")
    ids, mask, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in "xmy")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "m"], ["y"])], "words", [ids, mask], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "words.onnx")
    ingot.export_model(folder / "words.onnx").save(folder / "words.ingot")
    return folder / "words.ingot"


@pytest.mark.matrix
def test_a_plan_names_the_size_of_its_requests(run_ingot: RunIngot, words: Path) -> None:
    done = run_ingot("deploy", "capacity", words, "--rate", "10", *SLO)
    said = succeeded(done)
    assert "a request                x INT64[1, " in said
    assert "the plan is for requests of these sizes only" in done.stderr
    assert "--measure --shape x:1," in done.stderr


@pytest.mark.matrix
def test_a_model_of_one_size_has_no_note_about_sizes(run_ingot: RunIngot, digits_fp32: Path) -> None:
    done = run_ingot("deploy", "capacity", digits_fp32, "--rate", "10", *SLO)
    assert "image FP32[1, 1, 8, 8]" in succeeded(done)
    assert "of these sizes only" not in done.stderr


@pytest.mark.matrix
def test_a_plan_for_requests_of_a_given_size(run_ingot: RunIngot, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.deploy.capacity.calibration._SECONDS", 1)
    plans = []
    for size in (1, 100_000):
        shapes = ("--shape", f"x:1,{size}", "--shape", f"m:1,{size}")
        command = ("deploy", "capacity", words, "--rate", "1", "--slo", "p50=1s", "--measure", "--cores", "1", "--json")
        plans.append(json.loads(succeeded(run_ingot(*command, *shapes))))
    small, large = plans
    assert large["sample"] == "x INT64[1, 100000], m INT64[1, 100000]"
    assert large["replica"]["latency"]["1"] > small["replica"]["latency"]["1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "x:1,5"], "--shape needs --measure"),
        (["--measure", "--shape", "x"], "is not a shape; write it as image:1,3,224,224"),
        (["--measure", "--shape", "ids:1,5"], "--shape names 'ids'; the model's inputs are x, m"),
        (["--measure", "--shape", "x:1,777"], "they must agree"),
        (["--measure", "--shape", "x:2,5", "--shape", "m:2,5"], "a plan is for requests of one sample"),
    ],
)
def test_wrong_shapes(run_ingot: RunIngot, words: Path, arguments: list[str], message: str) -> None:
    done = run_ingot("deploy", "capacity", words, "--rate", "9", *SLO, "--cores", "1", *arguments)
    done.stderr = done.stderr.removeprefix("Opening\n")
    assert message in refused(done)
