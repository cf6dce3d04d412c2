"""``ingot quantize`` as a user types it, in a separate process whose candidates have the speed that the test sets."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.errors import Code, IngotError, StorageFull
from ingot.model_store import Archive
from ingot.quant.report.records import Report
from tests.quant import small_models
from tests.quant.small_models import rows, run
from tests.support import ROOT, RunIngot

Result = subprocess.CompletedProcess[str]

# The command, where each candidate is so many times as fast as the original, and timing takes so many seconds.
PROGRAM = """
import sys
from ingot.quant.search import search
from ingot.runtime.profiling import profile
from tests.quant.small_models import timing
profile.measure_together = timing(float(sys.argv[1]), float(sys.argv[2]))
search.installed = lambda: ("onnxruntime",)
sys.argv[1:3] = []
from ingot.cli.main import main
main()
"""


class Quantize(Protocol):
    def __call__(self, *args: str | Path, speed: float = 2.0) -> Result: ...


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive, data with labels and other data."""
    folder = tmp_path_factory.mktemp("made")
    archive = small_models.classifier()
    archive.save(folder / "m.ingot")
    x = rows(200)
    y = run(archive, "fp32", {"x": x})["logits"]
    np.savez(folder / "data.npz", x=x, y=y.argmax(1), exact=y)
    np.savez(folder / "one-class.npz", x=x, y=np.zeros(200, np.int64))
    np.savez(folder / "nan.npz", x=np.full((5, 8), np.nan, np.float32))
    np.savez(folder / "lengths.npz", x=x, y=y.argmax(1)[:-1])
    np.savez(folder / "zeros.npz", x=np.zeros((400, 8), np.float32))
    (folder / "text.npz").write_text("no array at all")
    exits = "import sys\n\ndef now(outputs, data):\n    sys.exit(0)\n"
    (folder / "exits.py").write_text(exits)
    (folder / "exits_at_once.py").write_text(f"{exits}\nnow(0, 0)\n")
    return folder


def _command(*args: str | Path, speed: float = 2.0, wait: float = 0) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(speed), str(wait), "quantize", *map(str, args)]


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "INGOT_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80"}


@pytest.fixture
def quantize(made: Path, tmp_path: Path) -> Quantize:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)

    def start(*args: str | Path, speed: float = 2.0) -> Result:
        return subprocess.run(
            _command(*args, speed=speed),
            cwd=tmp_path,
            env=_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
        )

    return start


def succeeded(result: Result, code: int = 0) -> str:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


def refused(result: Result) -> str:
    """Check that a command failed as every one must: one paragraph, nothing on stdout, exit code 1."""
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert lines[-1] == error
    assert "Traceback" not in result.stderr
    assert "bug in Ingot" not in result.stderr
    return error.removeprefix("error: ")


class TestSearch:
    @pytest.mark.matrix
    def test_printed_and_written_output(self, quantize: Quantize, run_ingot: RunIngot, tmp_path: Path) -> None:
        metric = ("--calibrate", "data.npz", "--metric", "accuracy:labels=y", "--max-drop", "0.05")
        result = quantize("m.ingot", *metric, "-o", "q.ingot", "--report", "q.html")
        lines = succeeded(result).splitlines()
        assert lines[0].rstrip() == "accuracy:labels=y may drop by 0.05"
        assert all(len(line) <= 80 for line in lines)
        assert sum("chosen" in line for line in lines) == 1
        assert lines[-1].startswith("q.ingot: classifier, int8 ")
        assert ", the original " in lines[-1]
        assert "accuracy:labels=y: 1.0000 before, " in result.stderr
        assert "on 100 held-out samples" in result.stderr
        assert (
            "speed compared with the original: 2.00x at batch 1, 2.00x at batch 8, 2.00x at batch 32" in result.stderr
        )
        assert "wrote the report to q.html" in result.stderr

        page = (tmp_path / "q.html").read_text()
        HTMLParser().feed(page)
        assert "<svg" in page
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]

        archive = Archive.open(tmp_path / "q.ingot")
        archive.verify()
        assert [variant.name for variant in archive.variants] == ["int8", "fp32"]
        shown = succeeded(run_ingot("inspect", "q.ingot", "--report", "again.html"))
        assert "accuracy:labels=y" in shown
        assert "preferred: int8" in shown
        again = (tmp_path / "again.html").read_text()
        assert again == page

    @pytest.mark.matrix
    def test_as_json(self, quantize: Quantize, tmp_path: Path) -> None:
        result = quantize("m.ingot", "--calibrate", "data.npz", "-o", "q.ingot", "--report", "r.json", "--json")
        found = json.loads(succeeded(result))
        assert (found["verdict"], found["reason"]) == ("quantized", "")
        assert [variant["variant"] for variant in found["variants"]] == ["int8", "fp32"]
        assert found["digest"] == Archive.open(tmp_path / "q.ingot").digest
        report = Report.model_validate(found["report"])
        assert report == Report.model_validate_json((tmp_path / "r.json").read_text())
        assert report.data.source == "data.npz"
        assert report.metric == "cosine"

    @pytest.mark.matrix
    def test_without_data(self, quantize: Quantize, tmp_path: Path) -> None:
        result = quantize("m.ingot", "-o", "q.ingot", "--report", "r.txt")
        assert succeeded(result).splitlines()[-1].startswith("q.ingot: classifier, int8 ")
        assert "note: measured on generated inputs only: pass real ones for a reliable result" in result.stderr
        assert "generated inputs" in (tmp_path / "r.txt").read_text()

    @pytest.mark.matrix
    def test_nothing_faster(self, quantize: Quantize, tmp_path: Path) -> None:
        before = Archive.open(tmp_path / "m.ingot").digest
        command = ("m.ingot", "--calibrate", "data.npz", "-o", "q.ingot")
        result = quantize(*command, speed=0.9)
        assert succeeded(result, code=3).splitlines()[-1] == "q.ingot: classifier, unchanged"
        assert "warning: no candidate is faster than the original on this machine; the model is" in result.stderr
        assert Archive.open(tmp_path / "q.ingot").digest == before
        assert "not faster" in result.stdout

    @pytest.mark.matrix
    def test_a_budget_that_cannot_be_met(self, quantize: Quantize, tmp_path: Path) -> None:
        before = Archive.open(tmp_path / "m.ingot").digest
        metric = ("--metric", "mae:labels=exact", "--max-drop", "0")
        result = quantize("m.ingot", "--calibrate", "data.npz", *metric, "-o", "q.ingot", "--json")
        found = json.loads(succeeded(result, code=3))
        assert found["verdict"] == "budget broken"
        assert "the most exact is '" in found["reason"]
        assert "2.00 times as fast" in found["reason"]
        assert found["digest"] == Archive.open(tmp_path / "q.ingot").digest == before

    @pytest.mark.matrix
    def test_a_second_run_over_existing_output(self, quantize: Quantize, tmp_path: Path) -> None:
        (tmp_path / "q.ingot").write_text("something else")
        succeeded(quantize("m.ingot", "--calibrate", "data.npz", "-o", "q.ingot"))
        assert len(Archive.open(tmp_path / "q.ingot").variants) == 2
        message = refused(quantize("q.ingot", "--calibrate", "data.npz", "-o", "again.ingot"))
        assert message.endswith("has a variant 'int8' already; quantize the archive from which it was made")
        Archive.open(tmp_path / "q.ingot").verify()

    @pytest.mark.matrix
    def test_a_reference_in_and_a_variant_by_its_name(self, quantize: Quantize, run_ingot: RunIngot) -> None:
        succeeded(run_ingot("copy", "m.ingot", "m:1"))
        assert succeeded(quantize("m:1", "--calibrate", "data.npz", "-o", "q.ingot")).count("int8") > 0

    @pytest.mark.matrix
    def test_the_time_is_limited(self, quantize: Quantize) -> None:
        result = quantize("m.ingot", "--calibrate", "data.npz", "--budget", "0.000000001s", "-o", "q.ingot")
        assert succeeded(result, code=3) == "q.ingot: classifier, unchanged\n"
        assert "the time was up before anything was tried" in result.stderr


# Queries that find their document among all others, as a number and as one value per query; and a metric of pairs.
PAIRED = """
import numpy as np

def hits(outputs, data):
    found = outputs["logits"] / np.linalg.norm(outputs["logits"], axis=1, keepdims=True)
    queries, documents = data["query"] == 1, data["query"] == 0
    best = (found[queries] @ found[documents].T).argmax(1)
    return data["pair"][documents][best] == data["pair"][queries]

def recall(outputs, data):
    return hits(outputs, data).mean()

def complete(outputs, data):
    numbers, counts = np.unique(data["pair"], return_counts=True)
    assert (counts % 2 == 0).all(), "a pair was torn apart"
    return (outputs["logits"].argmax(1) == data["pair"] % 4).mean()

complete.groups = "pair"
"""


class TestPairedRows:
    @pytest.fixture(autouse=True)
    def _pairs(self, tmp_path: Path) -> None:
        pair = np.tile(np.arange(80), 2)
        x = rows(80)[pair] + 0.1 * rows(160, seed=1)
        np.savez(tmp_path / "pairs.npz", x=x, pair=pair, query=np.repeat([1, 0], 80))
        (tmp_path / "scores.py").write_text(PAIRED)

    @pytest.mark.matrix
    def test_a_number_of_rows_that_belong_together_has_no_false_interval(
        self, quantize: Quantize, tmp_path: Path
    ) -> None:
        data = ("--calibrate", "data.npz", "--validate", "pairs.npz", "--metric", "scores:recall", "--max-drop", "1")
        result = quantize("m.ingot", *data, "-o", "q.ingot", "--report", "r.json")
        succeeded(result)
        report = Report.model_validate_json((tmp_path / "r.json").read_text())
        for score in (report.before, report.after, report.drop):
            assert score is not None
            assert score.low <= score.value <= score.high
        assert "after, on 160 held-out samples" in result.stderr
        assert "note: the metric scores:recall has no 95 % interval" in result.stderr

    @pytest.mark.matrix
    def test_values_per_unit_yield_the_interval_of_their_mean(self, quantize: Quantize, tmp_path: Path) -> None:
        data = ("--calibrate", "data.npz", "--validate", "pairs.npz", "--metric", "scores:hits", "--max-drop", "1")
        result = quantize("m.ingot", *data, "-o", "q.ingot", "--report", "r.json")
        succeeded(result)
        before = Report.model_validate_json((tmp_path / "r.json").read_text()).before
        assert before is not None
        assert 0.5 < before.value < 0.95
        half = 1.96 * (before.value * (1 - before.value) / 80) ** 0.5
        assert before.high - before.value == pytest.approx(half, rel=0.3)
        assert before.value - before.low == pytest.approx(half, rel=0.3)
        assert "no 95 % interval" not in result.stderr

    @pytest.mark.matrix
    def test_groups_are_neither_divided_nor_drawn_in_part(self, quantize: Quantize, tmp_path: Path) -> None:
        data = ("--calibrate", "pairs.npz", "--metric", "scores:complete", "--max-drop", "1")
        result = quantize("m.ingot", *data, "-o", "q.ingot", "--report", "r.json")
        succeeded(result)
        report = Report.model_validate_json((tmp_path / "r.json").read_text())
        assert (report.data.calibration_rows, report.data.evaluation_rows) == (80, 80)
        assert report.before is not None
        assert report.before.low < report.before.value < report.before.high

    @pytest.mark.matrix
    def test_groups_that_are_not_in_the_data(self, quantize: Quantize) -> None:
        command = ("m.ingot", "--calibrate", "data.npz", "--metric", "scores:complete", "-o", "q.ingot")
        assert "has no array 'pair'; it contains: y, exact" in refused(quantize(*command))


class TestRecipes:
    @pytest.mark.matrix
    def test_one_that_is_slower(self, quantize: Quantize, tmp_path: Path) -> None:
        command = ("m.ingot", "--recipe", "weight-int8", "--option", "block=32", "--batch", "2", "-o", "q.ingot")
        message = refused(quantize(*command, speed=0.5))
        assert message == (
            "the result of 'weight-int8' is not faster than the original on this machine (0.50x at batch 2); "
            "force keeps it (--force)"
        )
        assert not (tmp_path / "q.ingot").exists()
        result = quantize(*command, "--force", speed=0.5)
        assert succeeded(result).startswith("q.ingot: classifier, int8 ")
        assert "warning: the result is not faster than the original" in result.stderr
        variants = Archive.open(tmp_path / "q.ingot").variants
        assert [variant.name for variant in variants] == ["fp32", "int8"]
        assert variants[1].serving.recipe is not None
        assert variants[1].serving.recipe["block"] == 32

    @pytest.mark.matrix
    def test_one_for_gpus(self, quantize: Quantize, tmp_path: Path) -> None:
        result = quantize("m.ingot", "--calibrate", "data.npz", "--recipe", "bf16", "--keep", "first", "-o", "q.ingot")
        assert succeeded(result).startswith("q.ingot: classifier, bf16 ")
        variants = Archive.open(tmp_path / "q.ingot").variants
        assert [variant.name for variant in variants] == ["fp32", "bf16"]
        assert variants[1].serving.requires["device"] == "cuda"


class TestInterrupted:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.matrix
    def test_the_same_command_resumes(self, quantize: Quantize, tmp_path: Path, number: int, code: int) -> None:
        args = ("m.ingot", "--calibrate", "data.npz", "-o", "q.ingot")
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        with subprocess.Popen(
            _command(*args, wait=0.3),
            cwd=tmp_path,
            env={**_environment(tmp_path), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            seen = []
            for line in process.stderr or ():
                seen.append(line)
                if line.startswith("Trying static int8 (1 tried"):
                    process.send_signal(number)
                    break
            out, rest = process.communicate(timeout=60)
        assert process.returncode == code, (seen, rest)
        assert out == ""
        assert "Traceback" not in rest
        assert not list(temporary.iterdir())
        assert [path.name for path in tmp_path.iterdir() if "q.ingot" in path.name] == [".q.ingot.search"]

        result = quantize(*args)
        assert succeeded(result).splitlines()[-1].startswith("q.ingot: classifier, int8 ")
        assert "Continuing after a candidate of an interrupted search" in result.stderr
        assert "Trying dynamic int8\n" not in result.stderr
        assert [path.name for path in tmp_path.iterdir() if "q.ingot" in path.name] == ["q.ingot"]


@pytest.mark.matrix
def test_a_search_is_not_lost_where_its_result_cannot_be_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(archive: Archive, path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    small_models.make_faster(monkeypatch)
    monkeypatch.chdir(made)
    args = ["quantize", "m.ingot", "--calibrate", "data.npz", "-o", str(tmp_path / "q.ingot")]
    with monkeypatch.context() as patch:
        patch.setattr(Archive, "save", full)
        error = CliRunner().invoke(app, args).exception
        assert isinstance(error, StorageFull)
        assert str(error) == f"no space is left in {tmp_path}: free some, or choose another folder"
    assert [path.name for path in tmp_path.iterdir()] == [".q.ingot.search"]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["q.ingot"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipe", "int9"], "there is no recipe 'int9'; there are: auto, static-int8, dynamic-int8"),
        (["--recipe", "static-int8"], "needs calibration data; pass some (--calibrate), or use dynamic-int8"),
        (["--recipe", "weight-int8", "--option", "blok=32"], "'blok=32' is not an option of weight-int8; there are: "),
        (["--recipe", "weight-int8", "--option", "block=x"], "'block=x': x is not a number"),
        (["--recipe", "weight-int8", "--option", "block=7"], "the block is 7; it must be 16, 32, 64, 128 or 256"),
        (["--recipe", "dynamic-int8", "--option", "per_channel=no"], "'per_channel=no': it must be true or false"),
        (["--recipe", "static-int8", "--option", "calibration=max"], "calibration of static-int8 is 'max'; it must be"),
        (["--option", "block=32"], "--option belongs to a recipe; name the recipe with --recipe"),
        (["--metric", "acuracy"], "there is no metric 'acuracy'; did you mean accuracy"),
        (["--metric", "accuracy:labels=y"], "needs labels, and no data was given"),
        (["--calibrate", "data.npz", "--metric", "accuracy:labels=z"], "has no array 'z'; it contains: "),
        (["--calibrate", "one-class.npz", "--metric", "accuracy:labels=y"], "class"),
        (["--calibrate", "lengths.npz"], "lengths.npz"),
        (["--calibrate", "nan.npz"], "the calibration data in nan.npz contains NaN or infinity in 'x'"),
        (["--calibrate", "text.npz"], "text.npz"),
        (["--calibrate", "nope.npz"], "there is no file nope.npz"),
        (["--validate", "nope.npz"], "there is no file nope.npz"),
        (["--calibrate", "data.npz", "--transform", "crop=3"], "a transform is for a folder of images"),
        (["--keep", "frist"], "there is no layer 'frist' to keep; the nearest are: first"),
        (["--calibrate", "zeros.npz"], "all 400 rows of the calibration data in zeros.npz are equal: accuracy that is"),
        (
            ["--metric", "exits:now"],
            "now failed (exits.py:4): ExitRequested: the code ends the process (SystemExit: 0)",
        ),
        (
            ["--metric", "exits_at_once:now"],
            "cannot be imported: ExitRequested: the code ends the process (SystemExit: 0)",
        ),
        (["--keep", "first", "--keep", "second"], "every layer is kept in floating point, so that nothing"),
        (["--budget", "5x"], "'5x' is not a duration; write it as 50ms, 90s, 5m or 1h"),
        (["--budget", "0m"], "the time budget is 0.0 s; it must be more than 0"),
        (["--batch", "0"], "the batch sizes are [0]; pass at least one, each 1 or more"),
        (["--threads", "0"], "0 threads cannot run a model"),
        (["--seed", "-1"], "the seed is -1; it must be 0 or more"),
        (["--max-drop", "-1"], "the largest drop is -1.0; it must be 0 or more"),
        (["--engine", "tensorrt"], "unknown engine 'tensorrt'; use onnxruntime or openvino"),
        (["--report", "r.pdf"], "a report cannot be written as r.pdf; end its name in .html, .json, .txt"),
        (["--report", "no/r.html"], "cannot write no/r.html: there is no folder no"),
        (["-o", "m.ingot"], "cannot write m.ingot: it is also the file of the model; name another"),
        (["-o", "./m.ingot"], "cannot write m.ingot: it is also the file of the model"),
        (
            ["--calibrate", "data.npz", "-o", "data.npz"],
            "cannot write data.npz: it is also the file of the calibration",
        ),
        (["--validate", "x.html", "--report", "x.html"], "it is also the file of the validation; name another"),
        (["-o", "k.html", "--report", "k.html"], "cannot write k.html: it is also the file of the archive"),
        (["-o", "/dev/null"], "cannot write /dev/null: it is a device, pipe or socket; name a file"),
        (["--report", "/dev/null"], "cannot write /dev/null: it is a device"),
        (["--threads", "100000"], "100000 threads cannot run a model; give "),
        (["--max-drop", "inf"], "the largest drop is inf; give the accepted loss of the metric"),
        (["-o", "no/q.ingot"], "cannot write no/q.ingot: there is no folder no"),
    ],
)
def test_each_refusal_with_its_remedy(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    """In this process: how errors are printed is tested above."""
    monkeypatch.chdir(made)
    out = tmp_path / "q.ingot"
    result = CliRunner().invoke(app, ["quantize", "m.ingot", "-o", str(out), *args])
    assert isinstance(result.exception, IngotError), result.exception
    assert message in str(result.exception)
    assert result.exception.code is not Code.INTERNAL
    assert list(tmp_path.iterdir()) == []
