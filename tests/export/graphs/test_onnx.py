"""ONNX graphs in the form of the report."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ingot.export.graphs.onnx import of_bytes
from ingot.export.report import GraphView


def read(*nodes: onnx.NodeProto, weights: dict[str, np.ndarray] | None = None) -> GraphView:
    tensors = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", None]) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors))
    return of_bytes("ONNX", model.SerializeToString())


def test_types_weights_and_attributes() -> None:
    gemm = helper.make_node("Gemm", ["x", "w"], ["h"], name="/body/0/Gemm", alpha=0.5, transB=1)
    view = read(gemm, helper.make_node("Relu", ["h"], ["y"]), weights={"w": np.ones((4, 3), np.float16)})
    first, last = view.nodes
    assert first.attributes == {"alpha": "0.5", "transB": "1"}
    assert first.module == "body.0"
    assert (last.dtype, last.shape) == ("float32", "[batch,?]")
    assert view.weights == {"w": "float16[4,3]"}
    assert view.inputs == {"x": "float32[batch,?]"}
    assert view.outputs == {"y": "y"}
    assert view.operators == {"Gemm": 1, "Relu": 1}


def test_all_kinds_of_attributes() -> None:
    tensor = numpy_helper.from_array(np.ones((2, 2), np.int64))
    node = helper.make_node(
        "Own",
        ["x"],
        ["y"],
        domain="mine",
        text="a",
        floats=[0.5, 2.0],
        ints=list(range(20)),
        strings=["a", "b"],
        t=tensor,
    )
    [shown] = read(node).nodes
    assert shown.operator == "mine::Own"
    assert shown.attributes == {
        "text": "a",
        "floats": "[0.5, 2]",
        "ints": "[0, 1, 2, 3, 4, 5, 6, 7, ...]",
        "strings": "2 strings",
        "t": "int64[2,2]",
    }


def test_branches_come_before_their_node_and_keep_equal_names_apart() -> None:
    def branch(operator: str) -> onnx.GraphProto:
        inner = helper.make_node(operator, ["x"], ["r"])
        return helper.make_graph(
            [inner], operator, [], [helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)]
        )

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg"))
    view = read(node, weights={"c": np.array(True)})
    assert {each.operator for each in view.nodes[:2]} == {"Relu", "Neg"}
    assert [each.name for each in view.nodes] == ["r", "r (2)", "y"]
    assert {each.module for each in view.nodes} == {"If y.then_branch", "If y.else_branch", ""}
    assert set(view.nodes[-1].inputs) == {"c", "r", "r (2)"}
