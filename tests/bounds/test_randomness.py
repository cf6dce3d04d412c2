"""Operators that draw numbers are found wherever a graph has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ingot.bounds.randomness import random_of

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1), helper.make_opsetid("com.example", 1)]
VALUES = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
NOISE = helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")
FLAGS = [numpy_helper.from_array(np.array(value), name) for name, value in (("on", True), ("off", False))]


def save(path: Path, nodes: Sequence[NodeProto], functions: Sequence[onnx.FunctionProto] = ()) -> Path:
    graph = helper.make_graph(nodes, "g", VALUES[:1], VALUES[1:], FLAGS)
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, functions=functions, ir_version=8), path)
    return path


def branch(node: NodeProto) -> onnx.GraphProto:
    return helper.make_graph([node], "branch", [], VALUES[1:])


CALM = helper.make_node("Identity", ["x"], ["y"])
CASES = {
    "plain": ([CALM], ""),
    "random": ([NOISE], "node 'noise' (RandomNormalLike) is random"),
    "branch": (
        [helper.make_node("If", ["on"], ["y"], then_branch=branch(CALM), else_branch=branch(NOISE))],
        "node 'noise' (RandomNormalLike) is random",
    ),
    "custom": ([helper.make_node("Op", ["x"], ["y"], domain="com.example")], "node 'y' (com.example.Op) is a custom"),
    "dropout": ([helper.make_node("Dropout", ["x"], ["y"])], ""),
    "dropout-off": ([helper.make_node("Dropout", ["x", "", "off"], ["y"])], ""),
    "dropout-on": ([helper.make_node("Dropout", ["x", "", "on"], ["y"])], "node 'y' (Dropout) is random"),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_are_judged(case: str, tmp_path: Path) -> None:
    nodes, reason = CASES[case]
    found = random_of(save(tmp_path / "model.onnx", nodes))
    assert found.startswith(reason) if reason else not found


@pytest.mark.parametrize(("inner", "reason"), [(CALM, ""), (NOISE, "node 'noise' (RandomNormalLike) is random")])
def test_functions_of_the_file_are_read(inner: NodeProto, reason: str, tmp_path: Path) -> None:
    function = helper.make_function("f", "F", ["x"], ["y"], [inner], OPSETS[:1])
    path = save(tmp_path / "model.onnx", [helper.make_node("F", ["x"], ["y"], domain="f")], [function])
    assert random_of(path) == reason


def test_a_file_that_cannot_be_read_is_not_certain(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    assert random_of(path) == "the file is empty"
