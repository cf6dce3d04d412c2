from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import lanes
from benchmarks.serving.contestants import Peer, contestants
from scripts import gpu as scripted
from tests import onnx_models


def run(main: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    assert callable(main)
    main()


def test_it_prints_a_row_for_each_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs on the CPU, where there is no pipeline; on a GPU the program is the same."""
    path = onnx_models.affine(tmp_path)
    run(lanes.main, [str(path), "--device", "cpu", "--batches", "1,4", "--seconds", "0.01"], monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("x \u2502") == 2
    assert "pipeline off" in printed


SMALL = ["--device", "cpu", "--small", "--seconds", "0.2", "--windows", "1", "--clients", "4", "--processes", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "triton"], "unknown peer 'triton'; there are litserve, mosec"),
        (["--peers", "mosec"], "mosec cannot take part: not installed; run python -m benchmarks.serving.install mosec"),
        (["--peers", "mosec", "--peer-python", "/nowhere/python"], "mosec cannot take part: .*/nowhere/python"),
    ],
)
def test_a_peer_that_cannot_take_part_is_reported_first(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ["--build", str(tmp_path / "build"), "--peer-build", str(tmp_path)]
    with pytest.raises(SystemExit, match=message):
        run(gpu.main, [*SMALL, *folders, *arguments], monkeypatch)
    assert not (tmp_path / "build").exists()


@pytest.mark.long
@pytest.mark.parametrize("peer", ["litserve", "mosec"])
def test_a_small_model_is_compared_with_a_peer(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contestant = contestants()[peer]
    assert isinstance(contestant, Peer)
    if why := contestant.missing(Path("build/serving").absolute()):
        pytest.skip(f"{peer}: {why}")
    options = ["--models", "bert", "--peers", peer, "--peer-waits", "1", "--build", str(tmp_path / "build")]
    run(gpu.main, [*SMALL, *options], monkeypatch)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| bert |"))
    cell = row.strip("|").split("|")[-1].strip()
    assert re.fullmatch(rf"{peer} (\d+\.\d\dx|holds no rate)", cell)


@pytest.mark.long
def test_small_models_are_served_on_the_cpu_and_written_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\n\nafter\n")
    monkeypatch.setattr(gpu, "PAGE", page)
    run(gpu.main, [*SMALL, "--max-batch", "4", "--build", str(tmp_path / "build"), "--write"], monkeypatch)
    written = page.read_text()
    assert "old" not in written
    assert ": not a GPU; ingot" in written
    for name in ("mlp", "resnet50", "bert", "decoder"):
        (row,) = (line for line in written.splitlines() if line.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == len(gpu.COLUMNS)
        assert all(float(cells[place]) > 0 for place in (3, 4))
        assert cells[5].endswith("(p99 \u2264 500 ms)") == (name in ("resnet50", "bert"))
    assert "--small" in written
    assert (
        written.partition("<!-- gpu: begin -->")[2].partition("<!-- gpu: end -->")[0].strip() in capsys.readouterr().out
    )


def script(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run scripts/gpu.py, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    try:
        scripted.main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        return int(ended.code or 0)
    return 0


def steps(monkeypatch: pytest.MonkeyPatch, **code: str) -> None:
    """Replace the steps by programs in Python."""
    monkeypatch.setattr(
        scripted,
        "STEPS",
        tuple(scripted.Step(name, f"timeit -n1 -r1 -s {shlex.quote(text)}", 60) for name, text in code.items()),
    )


def test_results_are_kept_after_each_step_and_failures_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, done = tmp_path / "results.json", tmp_path / "done"
    good = f"from pathlib import Path; assert not Path({str(done)!r}).exists(); print('fine')"
    steps(monkeypatch, good=good, bad=f"import json; json.loads(open({str(done)!r}).read())")
    assert script(monkeypatch, "run", out, "--device", "cpu") == 1
    found = json.loads(out.read_text())["steps"]
    assert [found[name]["outcome"] for name in ("good", "bad")] == ["passed", "failed"]
    assert "FileNotFoundError" in found["bad"]["output"]
    done.write_text("1")
    assert script(monkeypatch, "run", out, "--device", "cpu", "--again") == 0  # only the one that failed
    assert json.loads(out.read_text())["steps"]["bad"]["outcome"] == "passed"
    assert script(monkeypatch, "run", out, "--device", "cpu", "--minutes", "0") == 1
    assert json.loads(out.read_text())["steps"]["good"]["outcome"] == "not reached"


def test_results_of_another_machine_are_neither_kept_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(scripted, "write", written.append)
    out, done = tmp_path / "results.json", tmp_path / "done"
    steps(monkeypatch, good=f"open({str(done)!r}, 'a').write('1')")
    monkeypatch.setattr(scripted, "describe", lambda device: {"gpu": "A", "date": "1"})
    for arguments in (["--write"], ["--again"]):
        assert script(monkeypatch, "run", out, *arguments) == 0
    assert (done.read_text(), written) == ("1", [out])
    monkeypatch.setattr(scripted, "describe", lambda device: {"gpu": "B", "date": "1"})
    assert script(monkeypatch, "run", out, "--again") == 0
    assert done.read_text() == "11"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    with pytest.raises(SystemExit, match="nvidia-smi does not run"):
        script(monkeypatch, "run", out, "--again", "--write")
    assert written == [out]
    steps(monkeypatch, bad="raise ValueError")
    monkeypatch.setattr(scripted, "write", written.append)
    monkeypatch.setattr(scripted, "describe", lambda device: {"gpu": "B", "date": "1"})
    assert script(monkeypatch, "run", out, "--write") == 1
    assert written == [out, out]


def test_packages_of_an_earlier_tar_file_are_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> argparse.Namespace:
        if "--dest" in command:
            Path(command[command.index("--dest") + 1]).mkdir(exist_ok=True)
            (tmp_path / "gpu.wheels" / "new.whl").touch()
        return argparse.Namespace(stdout="pyproject.toml\0")

    monkeypatch.setattr("subprocess.run", download)
    (tmp_path / "gpu.wheels").mkdir()
    (tmp_path / "gpu.wheels" / "old.whl").touch()
    assert script(monkeypatch, "pack", tmp_path / "gpu.tar") == 0
    with tarfile.open(tmp_path / "gpu.tar") as archive:
        assert archive.getnames() == ["pyproject.toml", "wheels/new.whl"]


def test_a_step_over_its_limit_ends_with_its_processes(tmp_path: Path) -> None:
    waiting = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    step = scripted.Step(
        "slow", f"timeit -n1 -r1 {shlex.quote(waiting + '; import threading; threading.Event().wait()')}", 6
    )
    options = argparse.Namespace(device="cpu", out=tmp_path / "results.json")
    assert scripted.outcome(step, options, 2)["outcome"] == "out of time"


@pytest.mark.parametrize(
    ("name", "outcome"), [("tensorrt", "skipped"), pytest.param("resnet50", "passed", marks=pytest.mark.long)]
)
@pytest.mark.matrix
def test_the_steps_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, outcome: str) -> None:
    out = tmp_path / "results.json"
    assert script(monkeypatch, "run", out, "--device", "cpu", "--steps", name) == 0
    assert json.loads(out.read_text())["steps"][name]["outcome"] == outcome
    with pytest.raises(SystemExit, match="results of a CPU"):
        script(monkeypatch, "write", out)


def test_the_tables_are_made_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "BENCHMARKS", "RESULTS"):
        monkeypatch.setattr(scripted, name, tmp_path / name)
    scripted.PAGE.write_text("<!-- tested: begin -->\nold\n<!-- tested: end -->\n")
    scripted.BENCHMARKS.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    figures = "\n".join(["resnet50 | 1", "| model | rate |", "| --- | --- |", "| resnet50 | 1 |", "", "about"])
    machine = {"device": "cuda:0", "gpu": "NVIDIA H100", "driver": "580.1", "torch": "2.13.0", "date": "2026-01-31"}
    ran = {
        "ort_cuda": {"outcome": "passed", "summary": "9 passed in 3.10s", "output": ""},
        "confined": {"outcome": "failed", "summary": "1 failed", "output": ""},
        "resnet50": {"outcome": "passed", "summary": "about", "output": figures},
    }
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"machine": machine, "steps": ran}))
    assert script(monkeypatch, "write", results) == 0
    page = scripted.PAGE.read_text()
    assert "old" not in page
    assert "passed: 9 passed in 3.10s |" in page
    assert "failed: 1 failed |" in page
    assert "NVIDIA H100, driver 580.1; torch 2.13.0; 2026-01-31" in page
    assert "| resnet50 | 1 |\n\nNVIDIA H100" in scripted.BENCHMARKS.read_text()
    assert json.loads(scripted.RESULTS.read_text())["steps"] == ran


def test_the_documentation_has_the_table_of_the_results() -> None:
    found = json.loads(scripted.RESULTS.read_text()) if scripted.RESULTS.exists() else None
    assert "\n".join(scripted.table(found)) in scripted.PAGE.read_text()
    tests = Path(__file__).parents[1] / "gpu"
    assert {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")} <= {row[-1] for row in scripted.AREAS}
    assert {row[-1] for row in scripted.AREAS} == {step.name for step in scripted.STEPS}


@pytest.mark.matrix
def test_a_tar_file_has_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script(monkeypatch, "pack", tmp_path / "gpu.tar", "--without-packages") == 0
    with tarfile.open(tmp_path / "gpu.tar") as archive:
        names = archive.getnames()
    assert {"scripts/gpu.py", "tests/gpu/test_ort_cuda.py", "pyproject.toml"} <= {*names}
