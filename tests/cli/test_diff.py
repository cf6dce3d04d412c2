"""``ingot diff`` as a user types it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot.cli.archives.compare import _open_graph
from ingot.model_store.diff.records import LabelsChange
from ingot.model_store.diff.stages import compare_steps
from ingot.steps import object_detection
from tests import onnx_models
from tests.server import test_detection, test_image_steps, test_steps
from tests.steps.bert import tokenizer_file
from tests.support import RunIngot, succeeded

SIZE = 600  # a float32 matrix of 600 x 600 has more than 1 MiB


def trained(run_ingot: RunIngot, folder: Path, name: str, step: float) -> Path:
    """Export y = relu(x backbone) head, whose head was trained a while, and return the archive."""
    rng = np.random.default_rng(0)
    backbone = numpy_helper.from_array(rng.standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE, "backbone")
    head = numpy_helper.from_array(rng.standard_normal((SIZE, 10)).astype(np.float32) + np.float32(step), "head")
    nodes = [
        helper.make_node("MatMul", ["x", "backbone"], ["h"]),
        helper.make_node("Relu" if step else "Sigmoid", ["h"], ["g"]),
        helper.make_node("MatMul", ["g", "head"], ["y"]),
    ]
    kind = TensorProto.FLOAT
    inputs, outputs = [("x", kind, ("batch", SIZE))], [("y", kind, ("batch", 10))]
    onnx_models.save(folder / "net.onnx", nodes, inputs, outputs, [backbone, head])
    result = run_ingot("export", "net.onnx", "-o", f"{name}.ingot")
    assert result.returncode == 0, result.stderr
    return folder / f"{name}.ingot"


@pytest.mark.matrix
def test_two_versions_of_a_model(run_ingot: RunIngot, tmp_path: Path) -> None:
    first, second = trained(run_ingot, tmp_path, "a", 0), trained(run_ingot, tmp_path, "b", 1)
    run_ingot("copy", first, "net:1")
    result = run_ingot("diff", "net:1", second, "--report", "d.html")
    assert result.returncode == 0, result.stderr
    assert "wrote the differences to d.html" in result.stderr
    for part in ("net:1", "variant fp32: changed", "tensors: 1 unchanged, 1 changed", "head", "Relu", "% of the bytes"):
        assert part in result.stdout
        assert part.split(": ")[-1] in (tmp_path / "d.html").read_text()
    assert "backbone" not in result.stdout
    HTMLParser().feed((tmp_path / "d.html").read_text())

    result = run_ingot("diff", "net:1#fp32", f"{second}#fp32", "--json", "--report", "d.json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "d.json").read_text())
    assert found["shared"] > 0.95 * found["after"]["size"]
    (variant,) = found["variants"]
    (change,) = variant["graph"]["changed"]
    assert change["name"] == "head"
    assert change["values"]["largest"] == pytest.approx(1)
    assert {item["operator"] for item in variant["graph"]["operators"]} == {"Relu", "Sigmoid"}
    assert variant["golden_cases"] == 2
    assert "torch" not in result.stderr

    result = run_ingot("diff", first, first)
    assert result.returncode == 0
    assert "They are the same archive." in result.stdout
    result = run_ingot("diff", first, second, "--tensors", "0", "--report", "d.txt")
    assert "and 1 more" in result.stdout
    assert (tmp_path / "d.txt").read_text() == result.stdout


@pytest.mark.long
def test_a_version_in_a_registry(run_ingot: RunIngot, registry: str, tmp_path: Path) -> None:
    first, second = trained(run_ingot, tmp_path, "a", 0), trained(run_ingot, tmp_path, "b", 1)
    pushed = run_ingot("copy", second, f"{registry}/team/diffed:2")
    assert pushed.returncode == 0, pushed.stderr
    local, remote = (run_ingot("diff", first, other) for other in (second, f"{registry}/team/diffed:2"))
    assert remote.returncode == 0, remote.stderr
    assert remote.stdout.splitlines()[2:] == local.stdout.splitlines()[2:]
    assert "1 changed" in remote.stdout


def test_a_quantized_variant(run_ingot: RunIngot, digits_fp32: Path, digits_archive: Path) -> None:
    result = run_ingot("diff", digits_fp32, digits_archive)
    assert result.returncode == 0, result.stderr
    for part in ("1 added, 1 unchanged", "variant int8: added", "preferred variant", "variant fp32: unchanged"):
        assert part in result.stdout
    result = run_ingot("diff", f"{digits_archive}#fp32", f"{digits_archive}#int8")
    assert result.returncode == 0, result.stderr
    for part in ("variant fp32 and int8: changed", "precision", "recipe.name", "static-int8", "QuantizeLinear"):
        assert part in result.stdout


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nope.ingot", "digits.ingot"], "there is no file nope.ingot"),
        (["digits.ingot", "digits:7"], "has no model 'digits'"),
        (["digits.ingot#bf16", "digits.ingot"], "'digits' has no variant 'bf16'; it has: fp32"),
        (["digits.ingot", "digits.ingot", "--report", "a.pdf"], "end its name in .html, .json, .txt"),
        (
            ["digits.ingot", "a.html", "--report", "a.html"],
            "cannot write a.html: it is also the file of the second archive",
        ),
        (["broken.ingot", "digits.ingot"], "broken.ingot"),
    ],
)
def test_each_refusal_with_its_remedy(
    run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path, command: list[str], message: str
) -> None:
    content = digits_fp32.read_bytes()
    (tmp_path / "digits.ingot").write_bytes(content)
    (tmp_path / "broken.ingot").write_bytes(content[: len(content) // 2])
    result = run_ingot("diff", *command)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "bug in Ingot" not in result.stderr


def test_steps_of_texts(run_ingot: RunIngot, tmp_path: Path) -> None:
    """Another tokenizer and other labels, and answers that only one archive has recorded."""
    cased = json.loads(tokenizer_file())
    cased["normalizer"]["lowercase"] = False
    test_steps.make(tmp_path).save(tmp_path / "a.ingot")
    other = test_steps.make(
        tmp_path, tokenizer=json.dumps(cased).encode(), labels=["SHORT", "BRIEF"], golden=["the story was never dull"]
    )
    other.save(tmp_path / "b.ingot")
    result = run_ingot("diff", "a.ingot", "b.ingot", "--report", "d.html")
    shown = " ".join(succeeded(result).split())
    assert "tokenize: ids of hard texts 112 of 312 -" in shown
    assert "added 1 BRIEF removed 1 LONG of another number 1 SHORT" in shown
    assert "label 3 of 3 - score 0 of 3 none" in shown
    assert "the story was never dull LONG SHORT none" in shown
    assert "good SHORT BRIEF none" in shown
    assert "112 of 312" in (tmp_path / "d.html").read_text()
    [variant] = json.loads(succeeded(run_ingot("diff", "a.ingot", "b.ingot", "--json")))["variants"]
    assert variant["steps"]["labels"] == {"added": ["BRIEF"], "removed": ["LONG"], "moved": ["SHORT"]}
    assert variant["steps"]["notes"] == []


def test_steps_of_pictures(run_ingot: RunIngot, tmp_path: Path) -> None:
    test_image_steps.make(tmp_path).save(tmp_path / "a.ingot")
    test_image_steps.make(tmp_path, filter="box").save(tmp_path / "b.ingot")
    shown = " ".join(succeeded(run_ingot("diff", "a.ingot", "b.ingot")).split())
    resized = 'resize rule="exact" height=8 width=8'
    assert f'image: operation 1 {resized} {resized} filter="box"' in shown
    [variant] = json.loads(succeeded(run_ingot("diff", "a.ingot", "b.ingot", "--json")))["variants"]
    [step] = variant["steps"]["steps"]
    assert (step["step"], step["items"], step["refused"]) == ("image", 60, 0)
    assert step["differ"] > 40
    assert 1 < step["levels"] < 256
    assert variant["steps"]["labels"] is None


def test_labels_of_a_detector(tmp_path: Path) -> None:
    graph = test_detection.averages(tmp_path)
    options: dict[str, Any] = {"size": 8, "mean": (0, 0, 0), "std": (1, 1, 1), "function": "none"}
    variants = [
        ingot.export_model(graph, steps=object_detection(labels, **options), name="quarters").variant()
        for labels in (["red", "green", "blue"], ["red", "blue", "black"])
    ]
    found = compare_steps(variants[0], variants[1], _open_graph)
    assert found is not None
    assert found.labels == LabelsChange(added=("black",), removed=("green",), moved=("blue",))
