"""``ingot compare``, and ``ingot inspect --report`` of quantized archives, as a user types them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ingot.demo import Data, Digits
from ingot.model_store import Archive, BlobFolder, add_variant
from ingot.model_store.format import manifest
from ingot.quant.report.records import DOCUMENT, Candidate, Layer, Report
from tests.model_store import samples
from tests.support import RunIngot

EVIL = "<script>alert(1)</script>\x1b]0;owned\x07"


@pytest.mark.matrix
def test_a_model_and_its_quantized_form(
    run_ingot: RunIngot, digits: tuple[Digits, Data, Data], digits_fp32: Path, digits_archive: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "val.npz", image=digits[2].images, y=digits[2].labels)
    command: list[str | Path] = [
        "compare",
        digits_fp32,
        digits_archive,
        "--data",
        "val.npz",
        "--metric",
        "accuracy:labels=y",
    ]
    result = run_ingot(*command, "--batch", "1", "--batch", "4", "--report", "out.html")
    assert result.returncode == 0, result.stderr
    assert "wrote the comparison to out.html" in result.stderr
    for part in ("digits-int8.ingot#int8 against", "times as fast", "accuracy:labels=y", "val.npz", "logits", "dB"):
        assert part in result.stdout
    page = (tmp_path / "out.html").read_text()
    HTMLParser().feed(page)
    for part in ("digits-int8.ingot#int8", "<svg", "polyline", "accuracy:labels=y", "digits.ingot#fp32"):
        assert part in page

    run_ingot("copy", digits_archive, "digits:1")
    result = run_ingot("compare", "digits:1#fp32", "digits:1", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["before"]["variant"], found["after"]["variant"]) == ("fp32", "int8")
    assert found["goldens"]
    assert set(found["speedups"]) == {"1", "8", "32"}
    assert found["size_ratio"] < 0.5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nope.ingot", "nope.ingot"], "there is no file nope.ingot"),
        (["digits.ingot#bf16", "digits.ingot"], "'digits' has no variant 'bf16'; it has: fp32"),
        (["digits.ingot", "digits.ingot", "--data", "nope.npz"], "there is no file nope.npz"),
        (["digits.ingot", "digits.ingot", "--batch", "0"], "a call cannot be timed with 0 rows"),
        (["digits.ingot", "digits.ingot", "--report", "a.pdf"], "end its name in .html, .json, .txt"),
        (["digits.ingot", "digits.ingot", "--report", "no/a.html"], "there is no folder no"),
        (["a.html", "b.ingot", "--report", "a.html"], "cannot write a.html: it is also the file of the first model"),
        (["a.ingot", "b.ingot", "--data", "d.txt", "--report", "d.txt"], "d.txt: it is also the file of the data"),
        (["digits.ingot", "digits.ingot", "--threads", "100000"], "100000 threads cannot run a model; give"),
        (["digits.ingot", "digits.ingot", "--metric", "acuracy"], "did you mean accuracy?"),
    ],
)
def test_each_refusal_with_its_remedy(
    run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    (tmp_path / "digits.ingot").write_bytes(digits_fp32.read_bytes())
    result = run_ingot("compare", *command)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stdout == ""
    assert "bug in Ingot" not in result.stderr


def two_reports(path: Path, quantization: bytes) -> Path:
    """Write an archive with a quantized variant, and the archive it was made from, each with its report."""
    blobs = BlobFolder.scratch()
    graph = blobs.put(b"a graph", manifest.WEIGHT)
    first = samples.serving()
    second = first.model_copy(update={"variant": "int8", "precision": "int8"})
    export = json.dumps({"name": "net", "source": "net.py", "created": "then"}).encode()
    variants = [
        add_variant(blobs, second, graph, [], [], {DOCUMENT: quantization}),
        add_variant(blobs, first, graph, [], [], {"report.json": export}),
    ]
    Archive.create(blobs, variants).save(path)
    return path


def test_the_preferred_variants_report_is_shown_or_that_which_is_named(run_ingot: RunIngot, tmp_path: Path) -> None:
    evil = Report(
        model=EVIL,
        candidates=(Candidate(name=EVIL, chosen=True, recipe={EVIL: EVIL}),),
        layers=(Layer(name=EVIL, operator=EVIL, scheme=EVIL, sqnr=12.5),),
        notes=(EVIL,),
    )
    archive = two_reports(tmp_path / "net.ingot", manifest.encode(evil))
    for suffix in ("html", "json", "txt"):
        result = run_ingot("inspect", archive, "--report", f"q.{suffix}")
        assert result.returncode == 0, result.stderr
        assert f"wrote the report of variant 'int8' to q.{suffix}" in result.stderr
        shown = (tmp_path / f"q.{suffix}").read_text()
        assert "12.5" in shown
        assert "owned" in shown
        assert not {"\x1b", "\x07"} & set(shown)
        assert suffix != "html" or "<script" not in shown
    result = run_ingot("inspect", f"{archive}#fp32", "--report", "e.txt")
    assert "wrote the report of variant 'fp32' to e.txt" in result.stderr
    assert "exported from net.py" in (tmp_path / "e.txt").read_text()
    result = run_ingot("inspect", f"{archive}#bf16")
    assert result.returncode == 1
    assert "has no variant 'bf16'; it has: int8, fp32" in result.stderr


def test_a_damaged_report_is_refused(run_ingot: RunIngot, tmp_path: Path) -> None:
    archive = two_reports(tmp_path / "net.ingot", b'{"model": "net", "budget": "much"}')
    result = run_ingot("inspect", archive, "--report", "q.html")
    assert result.returncode == 1
    assert "the quantization.json of variant 'int8' is not valid at 'budget'" in result.stderr
    assert not (tmp_path / "q.html").exists()
