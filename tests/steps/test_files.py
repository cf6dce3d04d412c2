"""The kinds of steps on files of any type, against magika's rules."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot.errors import InvalidArgument, Unsupported
from ingot.export import tasks
from ingot.steps.after.relabel import Relabel
from ingot.steps.bytes import Bytes
from ingot.steps.tasks.declared import read_steps
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes
from tests import onnx_models
from tests.support import RunIngot, succeeded


def ends(*files: bytes) -> tuple[list[list[int]], list[bytes]]:
    step = Bytes(first=4, last=3, block=8, least=2)
    found = step.open(lambda name: b"")({"file": as_bytes([*files])})
    assert found["bytes"].dtype == np.int32
    return found["bytes"].tolist(), found["decided"].tolist()


def test_the_ends_of_a_file_have_no_white_space() -> None:
    rows, decided = ends(b" \tabcdefghi\n", b"ab", b"  abcd" + b"." * 90 + b"xyz  ")
    assert rows == [
        [*b"abcd", *b"ghi"],
        [*b"ab", 256, 256, 256, *b"ab"],
        [*b"abcd", *b"xyz"],
    ]
    assert decided == [b"", b"", b""]


def test_white_space_that_fills_a_block_hides_what_is_behind_it() -> None:
    rows, decided = ends(b" " * 8 + b"abcd")
    assert rows == [[256] * 4 + [*b"bcd"]]
    assert decided == [b"txt"]


def test_short_files_are_named_without_the_model() -> None:
    rows, decided = ends(b"", b"a", b"\xff", b"   \n")
    assert decided == [b"empty", b"txt", b"unknown", b"txt"]
    assert rows[0] == [256] * 7


def relabelled(names: list[str], scores: list[float], decided: list[bytes]) -> tuple[list[bytes], Array]:
    step = Relabel(
        replaced={"noise": "unknown"}, thresholds={"markdown": 0.75}, texts=frozenset({"markdown", "python"})
    )
    values = {
        "label": as_bytes([name.encode() for name in names])[:, None],
        "score": np.array(scores, np.float32)[:, None],
        "decided": as_bytes(decided),
    }
    found = step.open(lambda name: b"")(values)
    return found["label"][:, 0].tolist(), found["score"][:, 0]


def test_names_follow_from_scores_and_replacements() -> None:
    names = ["python", "python", "markdown", "markdown", "png", "noise", "png"]
    labels, scores = relabelled(names, [0.5, 0.49, 0.75, 0.74, 0.3, 0.9, 0.9], [b""] * 6 + [b"empty"])
    assert labels == [b"python", b"txt", b"markdown", b"txt", b"unknown", b"unknown", b"empty"]
    assert scores.tolist() == pytest.approx([0.5, 0.49, 0.75, 0.74, 0.3, 0.9, 1])


TOML = """
task = "file-classification"
labels = ["low", "high"]
texts = ["low"]
first = 4
last = 4
values = "x"
logits = "y"
"""


def test_declared_steps_of_files_are_served(run_ingot: RunIngot, tmp_path: Path) -> None:
    """y = (1 - m, m) with the mean of the bytes, divided by 256."""
    nodes = [
        helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats", "axes"], ["mean"]),
        helper.make_node("Div", ["mean", "most"], ["high"]),
        helper.make_node("Sub", ["one", "high"], ["low"]),
        helper.make_node("Concat", ["low", "high"], ["y"], axis=1),
    ]
    constants = {"axes": np.array([1]), "most": np.array([256], np.float32), "one": np.ones(1, np.float32)}
    graph = onnx_models.save(
        tmp_path / "mean.onnx",
        nodes,
        [("x", TensorProto.INT32, ("batch", 8))],
        [("y", TensorProto.FLOAT, ("batch", 2))],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    (tmp_path / "steps.toml").write_text(TOML)
    done = run_ingot("export", graph, "--steps", tmp_path / "steps.toml", "--out", tmp_path / "mean.ingot")
    succeeded(done)
    assert "bytes -> graph -> classify -> relabel" in done.stderr
    with (
        ingot.serve(str(tmp_path / "mean.ingot"), http_port=0, grpc_port=0) as server,
        ingot.Client(server.http_url) as c,
    ):
        found = c.infer("mean", {"file": as_bytes([b"\x00" * 8, b"\xff" * 8, b""])})
    assert found["label"].tolist() == [[b"low"], [b"high"], [b"empty"]]


def test_labels_that_the_graph_does_not_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(TOML + "top_k = 2\n")
    with pytest.raises(InvalidArgument, match="'top_k' is not an option of the task file-classification"):
        read_steps(tmp_path / "steps.toml")


def test_a_folder_of_magika_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.min.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "magika", None)
    with pytest.raises(Unsupported, match="needs the package 'magika', which is not installed: pip install magika"):
        tasks.of_folder(tmp_path)
