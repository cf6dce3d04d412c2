from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ingot.quant.schemes import edit
from ingot.quant.schemes.edit import Operation
from tests.quant import graphs
from tests.quant.graphs import random

TEXT = "(float[n,4] x) => (float[n,4] y, float[n,4] z) { h = Relu(x) y = Neg(h) z = Abs(h) }"


def value(model: ir.Model, name: str) -> ir.Value:
    return next(value for node in model.graph for value in node.outputs if value.name == name)


def check(model: ir.Model, **expected: object) -> None:
    x = random(3, 4)
    answers = graphs.answers(model, {"x": x})
    h = np.maximum(x, 0)
    assert np.allclose(answers["y"], expected.get("y", -h))  # type: ignore[arg-type]
    assert np.allclose(answers["z"], expected.get("z", h))  # type: ignore[arg-type]


def test_constants_get_distinct_names() -> None:
    model = graphs.graph(TEXT, {})
    first, second = (edit.constant(model.graph, "c", np.array([number], np.float32)) for number in (1, 2))
    assert (first.name, second.name) == ("c", "c_2")
    assert edit.constant(model.graph, "c", np.array(0.5), ir.DataType.FLOAT16).dtype is ir.DataType.FLOAT16
    turned = edit.constant(model.graph, "turned", random(2, 3).T)
    assert turned.const_value is not None
    assert turned.const_value.tobytes() == np.ascontiguousarray(random(2, 3).T).tobytes()


def test_lazy_constants_are_made_when_they_are_read() -> None:
    model = graphs.graph(TEXT, {})
    made: list[int] = []

    def make() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        made.append(1)
        return random(4, 2).T

    lazy = edit.lazy(model.graph, "later", make, ir.DataType.FLOAT, (2, 4))
    assert not made
    assert (lazy.shape, lazy.dtype) == (ir.Shape((2, 4)), ir.DataType.FLOAT)
    assert lazy.const_value is not None
    for count in (1, 2):  # not kept
        assert lazy.const_value.tobytes() == np.ascontiguousarray(random(4, 2).T).tobytes()
        assert len(made) == count


def test_insertion_after_an_input_and_after_a_node() -> None:
    model = graphs.graph(TEXT, {})
    (x,) = model.graph.inputs
    inserted = edit.insert_after(model.graph, x, Operation("Neg", (x,), "n", ir.DataType.FLOAT))
    value(model, "h").producer().replace_input_with(0, inserted)  # type: ignore[union-attr]
    h = value(model, "h")
    doubled = edit.insert_after(model.graph, h, Operation("Add", (h, h), "d", ir.DataType.FLOAT))
    assert doubled.shape == h.shape
    value(model, "y").producer().replace_input_with(0, doubled)  # type: ignore[union-attr]
    h_expected = np.maximum(-random(3, 4), 0)
    check(model, y=-2 * h_expected, z=h_expected)


def test_a_replaced_node_leaves_its_name_to_the_result() -> None:
    model = graphs.graph(TEXT, {})
    node = value(model, "y").producer()
    assert node is not None
    made = edit.insert_before(model.graph, node, Operation("Identity", (value(model, "h"),), "i", ir.DataType.FLOAT))
    edit.replace(model.graph, node, made)
    assert [output.name for output in model.graph.outputs] == ["y", "z"]
    assert graphs.operators(model) == ["Relu", "Identity", "Abs"]
    check(model, y=np.maximum(random(3, 4), 0))


def test_redirection_spares_one_node_and_includes_the_graphs_output() -> None:
    model = graphs.graph("(float[n,4] x) => (float[n,4] y, float[n,4] z) { y = Relu(x) z = Neg(y) }", {})
    y = value(model, "y")
    doubled = edit.insert_after(model.graph, y, Operation("Add", (y, y), "d", ir.DataType.FLOAT))
    keep = doubled.producer()
    assert keep is not None
    edit.redirect(model.graph, y, doubled, keep=keep)
    assert [output.name for output in model.graph.outputs] == ["y", "z"]
    h = np.maximum(random(3, 4), 0)
    check(model, y=2 * h, z=-2 * h)


def test_names_are_made_unique_and_those_of_inputs_and_outputs_stay() -> None:
    model = graphs.graph(TEXT, {})
    h = value(model, "h")
    node = h.producer()
    assert node is not None
    for name in ("x", "y", "h", "h"):
        made = edit.insert_after(model.graph, h, Operation("Identity", (h,), name, ir.DataType.FLOAT))
        value(model, "y").producer()  # existing nodes keep their names if possible
        model.graph.outputs[1].producer().replace_input_with(0, made)  # type: ignore[union-attr]
        h = made
    edit.constant(model.graph, "z", np.zeros(1))
    edit.unique_names(model)
    values = [item.name for part in model.graph for item in part.outputs]
    assert len(set(values)) == len(values)
    nodes = [item.name for item in model.graph]
    assert all(nodes)
    assert len(set(nodes)) == len(nodes)
    assert [item.name for item in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y", "z"]
    check(model)
