"""Which graphs are bounded by the sizes of their inputs, and by how many bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.bounds import Bounds, bounds_of
from ingot.bounds.interval import Interval
from ingot.bounds.operators.indexing import _sliced
from ingot.runtime.profiling.call_memory import measured
from ingot.tensors import DType, Range, Signature, TensorSpec, ValueRange
from tests.onnx_models import save

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Inputs = Sequence[tuple[str, int, Sequence[int | str]]]


def bounds(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Inputs,
    constants: Sequence[onnx.TensorProto] = (),
    *,
    values: ValueRange | None = None,
    ranges: dict[str, Range] | None = None,
) -> Bounds:
    """Return the bounds of a graph whose last node's first output is its output."""
    outputs = [(nodes[-1].output[0], FLOAT, ())]
    path = save(folder / "model.onnx", nodes, inputs, outputs, constants)
    specs = tuple(
        TensorSpec(name, DType.from_onnx(kind), tuple(dims), values if kind == INT64 else None)
        for name, kind, dims in inputs
    )
    return bounds_of(path, Signature(specs, (), ranges=ranges or {}))


def number(name: str, value: int | Sequence[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, np.int64), name)


def loop(trips: str) -> onnx.NodeProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["carried", "carried"], ["sum"]), helper.make_node("Identity", ["going"], ["goes"])],
        "body",
        [
            helper.make_tensor_value_info("number", INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", FLOAT, [1]),
        ],
    )
    return helper.make_node("Loop", [trips, "", "x"], ["y"], name="forever", body=body)


SCALAR: Inputs = [("n", INT64, ())]
VALUES = helper.make_node("Constant", [], ["pair"], value=numpy_helper.from_array(np.array([0, 1], np.float32)))
DATA_DEPENDENT: dict[str, tuple[list[onnx.NodeProto], Inputs, str]] = {
    "Loop": ([loop("n")], [*SCALAR, ("x", FLOAT, (1,))], "repetitions comes from values"),
    "Expand": ([helper.make_node("Expand", ["x", "n"], ["y"])], [("x", FLOAT, (1,)), ("n", INT64, (1,))], "values"),
    "ConstantOfShape": ([helper.make_node("ConstantOfShape", ["n"], ["y"])], [("n", INT64, (1,))], "values"),
    "OneHot": (
        [VALUES, helper.make_node("OneHot", ["i", "n", "pair"], ["y"])],
        [("i", INT64, ("batch",)), *SCALAR],
        "depth comes from values",
    ),
    "Range": ([helper.make_node("Range", ["n", "n", "n"], ["y"])], SCALAR, "length comes from values"),
    "Tile": (
        [helper.make_node("Tile", ["x", "n"], ["y"])],
        [("x", FLOAT, (1,)), ("n", INT64, (1,))],
        "repeats|values",
    ),
    "Resize": (
        [helper.make_node("Resize", ["x", "", "", "n"], ["y"])],
        [("x", FLOAT, (1, 1, 2, 2)), ("n", INT64, (4,))],
        "values",
    ),
    "Pad": ([helper.make_node("Pad", ["x", "n"], ["y"])], [("x", FLOAT, (1,)), ("n", INT64, (2,))], "values"),
    "Div": (
        [helper.make_node("Div", ["x", "d"], ["y"])],
        [("x", INT64, ("batch",)), ("d", INT64, ("batch",))],
        "may be -1",
    ),
}


@pytest.mark.parametrize("operator", DATA_DEPENDENT)
def test_sizes_and_repetitions_from_values_are_not_bounded(tmp_path: Path, operator: str) -> None:
    nodes, inputs, reason = DATA_DEPENDENT[operator]
    found = bounds(tmp_path, nodes, inputs)
    assert not found.bounded
    assert f"({operator})" in found.reasons[0]
    assert any(word in found.reasons[0] for word in reason.split("|"))


@pytest.mark.parametrize("operator", sorted(DATA_DEPENDENT.keys() - {"Resize", "Pad"}))
def test_a_declared_range_of_the_values_bounds_them(tmp_path: Path, operator: str) -> None:
    nodes, inputs, _ = DATA_DEPENDENT[operator]
    found = bounds(tmp_path, nodes, inputs, values=ValueRange(1, 1000))
    assert found.bounded, found.reasons
    if operator in ("Expand", "ConstantOfShape", "Tile"):
        assert 4000 <= found.peak({}) <= 16000


def test_a_loop_of_many_repetitions_is_not_bounded_even_if_their_number_is_constant(tmp_path: Path) -> None:
    found = bounds(tmp_path, [loop("trips")], [("x", FLOAT, (1,))], [number("trips", 1 << 62)])
    assert "more than 1,048,576 times" in found.reasons[0]
    assert bounds(tmp_path, [loop("trips")], [("x", FLOAT, (1,))], [number("trips", 100)]).bounded


def test_the_peak_follows_the_sizes(tmp_path: Path) -> None:
    """A chain of shape operators that exporters write: y = expand(x, [batch, 2 * width])."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["batch"]),
        helper.make_node("Gather", ["shape", "one"], ["width"]),
        helper.make_node("Mul", ["width", "two"], ["twice"]),
        helper.make_node("Concat", ["batch", "one", "twice"], ["wanted"], axis=0),
        helper.make_node("ReduceSum", ["x", "one"], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "one"], ["thin"]),
        helper.make_node("Expand", ["thin", "wanted"], ["y"]),
    ]
    constants = [number("zero", [0]), number("one", [1]), number("two", [2])]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("batch", "width"))], constants)
    assert found.bounded, found.reasons
    answer = 4 * 5 * 2 * 7
    assert answer <= found.peak({"batch": 5, "width": 7}) <= answer + 200
    assert "batch width" in found.formula


def test_a_division_is_bounded_if_its_quotient_cannot_overflow(tmp_path: Path) -> None:
    inputs: Inputs = [("x", INT64, ("batch",)), ("d", INT64, ("batch",))]
    guarded = [
        helper.make_node("Equal", ["d", "minus"], ["reverses"]),
        helper.make_node("Where", ["reverses", "one", "d"], ["safe"]),
        helper.make_node("Div", ["x", "safe"], ["y"]),
    ]
    constants = [number("minus", -1), number("one", 1)]
    assert bounds(tmp_path, guarded, inputs, constants).bounded
    wrong = [guarded[0], helper.make_node("Where", ["reverses", "minus", "d"], ["safe"]), guarded[2]]
    assert not bounds(tmp_path, wrong, inputs, constants).bounded
    by_constant = [helper.make_node("Div", ["x", "by"], ["y"])]
    assert bounds(tmp_path, by_constant, inputs, [number("by", [2, 3, -2])]).bounded
    assert not bounds(tmp_path, by_constant, inputs, [number("by", [2, 3, -1])]).bounded


def test_nested_functions_end_with_a_reason_at_once(tmp_path: Path) -> None:
    """A file of 3 KB whose functions call each other twice each has 2**60 nodes."""
    functions = []
    for level in range(60):
        call = f"f{level + 1}" if level < 59 else "Neg"
        domain = "ours" if level < 59 else ""
        nodes = [
            helper.make_node(call, ["a"], ["b"], domain=domain),
            helper.make_node(call, ["b"], ["c"], domain=domain),
        ]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)]
        functions.append(helper.make_function("ours", f"f{level}", ["a"], ["c"], nodes, opsets))
    info = [helper.make_tensor_value_info(name, FLOAT, ["batch"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="ours")], "nested", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ours", 1)]
    path = tmp_path / "nested.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10), path)
    began = time.process_time()
    found = bounds_of(path, Signature((TensorSpec("x", DType.FP32, ("batch",)),), ()))
    assert "nested more than" in found.reasons[0]
    assert time.process_time() - began < 60  # minutes, if the limit did not hold


def test_an_einsum_of_fixed_sizes_is_bounded(tmp_path: Path) -> None:
    node = helper.make_node("Einsum", ["a", "b"], ["y"], equation="bij,jk->bik")
    found = bounds(tmp_path, [node], [("a", FLOAT, ("batch", 3, 4)), ("b", FLOAT, (4, 5))])
    assert found.bounded, found.reasons
    assert found.peak({"batch": 2}) >= 4 * 2 * 3 * 5


def test_unknown_operators_are_not_bounded(tmp_path: Path) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], name="who", domain="acme")
    found = bounds(tmp_path, [node], [("x", FLOAT, ("batch",))])
    assert found.reasons == ("node 'who' (acme.Mystery): no bounds are known for this custom operator",)


@pytest.mark.parametrize("content", [b"", b"\x3a", b"\xff" * 100, b"not a model"])
def test_a_damaged_file_is_not_bounded(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(content)
    signature = Signature((TensorSpec("x", DType.FP32, ("batch",)),), ())
    assert not bounds_of(path, signature).bounded


def test_a_size_that_may_be_zero_is_bounded_from_below_by_zero(tmp_path: Path) -> None:
    """With x of no rows, 5 - rows is 5."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Sub", ["five", "shape"], ["left"]),
        helper.make_node("ConstantOfShape", ["left"], ["y"]),
    ]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("rows",))], [number("five", [5])], ranges={"rows": Range(0, None)})
    assert found.bounded
    assert found.peak({"rows": 0}) >= 4 * 5


@pytest.mark.parametrize("most", [None, 64])
def test_a_slice_of_a_table_has_the_size_of_what_it_is_added_to(tmp_path: Path, most: int | None) -> None:
    """The position embeddings of an encoder, and its heads: scores [batch, 4, seq, seq]."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["table", "zero", "length", "zero"], ["positions"]),
        helper.make_node("Add", ["x", "positions"], ["placed"]),
        helper.make_node("Reshape", ["placed", "heads"], ["parts"]),
        helper.make_node("Transpose", ["parts"], ["query"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["parts"], ["key"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["query", "key"], ["y"]),
    ]
    table = numpy_helper.from_array(np.zeros((512, 8), np.float32), "table")
    constants = [table, number("zero", [0]), number("heads", [0, 0, -1, 2])]
    inputs: Inputs = [("x", FLOAT, ("batch", "seq", 8))]
    found = bounds(tmp_path, nodes, inputs, constants, ranges={"seq": Range(1, most)})
    assert found.bounded, found.reasons
    assert found.peak({"batch": 3, "seq": 50}) <= 4 * 3 * (4 * 50 * 50 + 3 * 50 * 8) + 100


def test_windows_of_a_padded_sequence_cover_it_once(tmp_path: Path) -> None:
    """seq is padded to a multiple of 7 and divided into windows: y [batch * windows, 7, 7]."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Mod", ["length", "seven"], ["over"]),
        helper.make_node("Sub", ["seven", "over"], ["missing"]),
        helper.make_node("Mod", ["missing", "seven"], ["amount"]),
        helper.make_node("Concat", ["nothing", "amount", "zero"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("Reshape", ["padded", "windows"], ["parts"]),
        helper.make_node("Transpose", ["parts"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["parts", "turned"], ["y"]),
    ]
    constants = [
        number("seven", [7]),
        number("zero", [0]),
        number("nothing", [0, 0, 0, 0]),
        number("windows", [-1, 7, 8]),
    ]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("batch", "seq", 8))], constants)
    assert found.bounded, found.reasons
    assert found.peak({"batch": 3, "seq": 50}) <= 4 * 3 * 56 * (8 + 8 + 8 + 7) + 200


def test_a_size_that_the_graph_divides_is_that_of_its_layer(tmp_path: Path) -> None:
    """A layer halves seq, and the code computes (seq - seq mod 2) / 2: the free size, that of the heads, is 4."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["pooled"], kernel_shape=[2], strides=[2]),
        helper.make_node("Transpose", ["pooled"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("Shape", ["x"], ["length"], start=2, end=3),
        helper.make_node("Mod", ["length", "two"], ["over"]),
        helper.make_node("Sub", ["length", "over"], ["even"]),
        helper.make_node("Div", ["even", "two"], ["half"]),
        helper.make_node("Concat", ["batch", "half", "heads"], ["shape"], axis=0),
        helper.make_node("Reshape", ["turned", "shape"], ["parts"]),
        helper.make_node("Transpose", ["parts"], ["query"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["parts"], ["key"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["query", "key"], ["y"]),
    ]
    constants = [number("two", [2]), number("batch", [0]), number("heads", [-1, 8])]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("batch", 32, "seq"))], constants, ranges={"seq": Range(2, None)})
    assert found.bounded, found.reasons
    assert found.peak({"batch": 3, "seq": 40}) <= 4 * 3 * (4 * 20 * 20 + 3 * 32 * 20) + 200


def test_a_convolution_copies_its_windows_in_parts(tmp_path: Path) -> None:
    """With few outputs these parts are most of a call's memory, and all windows would be 37 times as much."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    weight = numpy_helper.from_array(np.ones((2, 30, 5, 5), np.float32), "w")
    inputs: Inputs = [("x", FLOAT, ["batch", 30, "size", 36])]
    result: Inputs = [("y", FLOAT, ["batch", 2, "out", 32])]
    path = save(tmp_path / "conv.onnx", nodes, inputs, result, [weight])
    output = 4 * 2 * 2 * 32 * 32
    found = measured(path, {"x": np.ones((2, 30, 36, 36), np.float32)})
    assert 2 * output < found <= bounds_of(path).peak({"batch": 2, "size": 36}) < 3 * found


def test_slices_of_a_known_size_have_one_size() -> None:
    model = onnx.parser.parse_model(_SLICE)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    places = [-(2**31), -9, -5, -1, 0, 2, 4, 5, 9, 2**31 - 1]
    for size, start, end, step in itertools.product((0, 1, 5), places, places, (2, 3)):
        numbers = {"start": start, "end": end, "axis": 0, "by": step}
        inputs = {"x": np.zeros(size), **{name: np.array([number]) for name, number in numbers.items()}}
        found = _sliced(*map(Interval.exactly, (size, start, end, step)))
        assert found.constant == len(session.run(None, inputs)[0]), (size, start, end, step)


_SLICE = """<ir_version: 8, opset_import: ["": 17]>
graph (double[size] x, int64[1] start, int64[1] end, int64[1] axis, int64[1] by) => (double[result] y) {
  y = Slice(x, start, end, axis, by)
}"""
