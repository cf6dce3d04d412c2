from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import lanes
from benchmarks.serving.contestants import Peer, contestants
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
