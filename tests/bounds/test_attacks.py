"""Files that are made to look bounded and are not: each would freeze, fill or end the server's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.bounds import Bounds, bounds_of
from ingot.tensors import DType, Range, Signature, TensorSpec
from tests.bounds.test_bounds import INT64, Inputs, bounds, loop, number

FLOAT, INT32, UINT8, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT8, TensorProto.BOOL
node = helper.make_node
ONE = numpy_helper.from_array(np.array([1], np.float32), "one")
SIZES: Inputs = [("x", FLOAT, ("rows", "columns"))]


def real(name: str, value: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([value], np.float32), name)


def expanded(size: str) -> list[onnx.NodeProto]:
    """y = as many ones as the tensor ``size`` says."""
    return [node("Expand", ["one", size], ["y"])]


def cast(source: str, target: str, kind: int = INT64) -> onnx.NodeProto:
    return node("Cast", [source], [target], to=kind)


INPUT: Inputs = [("n", INT64, (1,))]
BYTE: Inputs = [("v", UINT8, (1,)), ("n", INT64, (1,))]
NUMBER: Inputs = [("f", FLOAT, (1,)), ("n", INT64, (1,))]
Attack = tuple[Sequence[onnx.NodeProto], Inputs, Sequence[onnx.TensorProto]]
ATTACKS: dict[str, Attack] = {
    # 3 * 0x5555555555555555 is -1.
    "a product that wraps around to -1": (
        [cast("v", "i"), node("Mul", ["i", "k"], ["d"]), node("Div", ["n", "d"], ["y"])],
        BYTE,
        [number("k", [0x5555555555555555])],
    ),
    "a cast that wraps around to -1": (
        [
            cast("v", "i"),
            node("Mul", ["i", "k"], ["w"]),
            cast("w", "d", INT32),
            cast("n", "m", INT32),
            node("Div", ["m", "d"], ["y"]),
        ],
        BYTE,
        [number("k", [0xFFFFFFFF])],
    ),
    "a sum of all updates": (
        [
            cast("v", "i"),
            node("ScatterElements", ["k", "zero", "i"], ["d"], reduction="mul"),
            node("Div", ["n", "d"], ["y"]),
        ],
        BYTE,
        [number("k", [0x5555555555555555]), number("zero", [0])],
    ),
    # 2**62 - 2**32 * 2**32 is 2**62.
    "a limit that wraps around": (
        [
            node("Mul", ["k", "k"], ["zero"]),
            node("Sub", ["most", "zero"], ["limit"]),
            node("Min", ["n", "limit"], ["size"]),
            *expanded("size"),
        ],
        INPUT,
        [number("k", [1 << 32]), number("most", [1 << 62]), ONE],
    ),
    "a difference that wraps around": (
        [node("Min", ["n", "five"], ["low"]), node("Sub", ["low", "ten"], ["size"]), *expanded("size")],
        INPUT,
        [number("five", [5]), number("ten", [10]), ONE],
    ),
    # In float32, (1e30 + 4e22) - 1e30 is 7.6e22.
    "a limit that is rounded": (
        [
            node("Add", ["large", "small"], ["a"]),
            node("Sub", ["a", "large"], ["b"]),
            node("Sub", ["b", "small"], ["c"]),
            cast("n", "f", FLOAT),
            node("Min", ["f", "c"], ["g"]),
            cast("g", "size"),
            *expanded("size"),
        ],
        INPUT,
        [real("large", 1e30), real("small", 4e22), ONE],
    ),
    # The cast of NaN is the least integer.
    "a limit that is not a number": (
        [
            node("Max", ["f", "one"], ["g"]),
            cast("g", "h"),
            node("Sub", ["minus", "h"], ["limit"]),
            node("Min", ["n", "limit"], ["size"]),
            *expanded("size"),
        ],
        NUMBER,
        [number("minus", [-1]), ONE],
    ),
    "a clip of what is not a number": (
        [
            node("Clip", ["f", "first", "last"], ["g"]),
            cast("g", "h"),
            node("Sub", ["minus", "h"], ["limit"]),
            node("Min", ["n", "limit"], ["size"]),
            *expanded("size"),
        ],
        NUMBER,
        [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in (("first", 1.0), ("last", 2.0))]
        + [number("minus", [-1]), ONE],
    ),
    "a tensor of another type than it says": (
        [node("Cast", ["n"], ["m"], to=(1 << 32) + INT64), node("Div", ["m", "m"], ["y"])],
        INPUT,
        [],
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_values_that_only_seem_limited(tmp_path: Path, attack: str) -> None:
    nodes, inputs, constants = ATTACKS[attack]
    path = tmp_path / "model.onnx"
    bounds(tmp_path, nodes, inputs, constants)
    specs = tuple(TensorSpec(name, DType.from_onnx(kind), tuple(dims)) for name, kind, dims in inputs)
    assert not bounds_of(path, Signature(specs, ())).bounded


def info(name: str, kind: int, dims: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def repeated(trips: str, nodes: Sequence[onnx.NodeProto], start: str = "x", out: str = "y") -> onnx.NodeProto:
    """A loop that carries ``state`` from ``start``, which its nodes replace by ``next``."""
    body = helper.make_graph(
        [*nodes, node("Identity", [f"going_{out}"], [f"goes_{out}"])],
        "body",
        [info(f"i_{out}", INT64, []), info(f"going_{out}", BOOL, []), info(f"state_{out}", FLOAT, None)],
        [info(f"goes_{out}", BOOL, []), info(f"next_{out}", FLOAT, None)],
    )
    return node("Loop", [trips, "", start], [out], body=body)


def test_a_carried_tensor_that_grows_without_a_known_shape(tmp_path: Path) -> None:
    """With shapes [-1, 1] and [1, -1], each repetition squares the number of elements."""
    body = [
        node("Reshape", ["state_y", "one_shape"], ["column"]),
        node("Reshape", ["state_y", "other_shape"], ["row"]),
        node("Add", ["column", "row"], ["next_y"]),
    ]
    nodes = [node("Reshape", ["x", "one_shape"], ["start"]), repeated("five", body, "start")]
    inputs = [*SIZES, ("one_shape", INT64, ("r",)), ("other_shape", INT64, ("s",))]
    found = bounds(tmp_path, nodes, inputs, [number("five", 5)])
    assert "carries changes" in found.reasons[0]


def test_repetitions_whose_terms_cancel_for_one_row(tmp_path: Path) -> None:
    """2**30 * rows - 2**30 + 1 is 1 for one row."""
    nodes = [
        node("Shape", ["x"], ["shape"], end=1),
        node("Mul", ["shape", "many"], ["product"]),
        node("Sub", ["product", "less"], ["trips"]),
        repeated("trips", [node("Neg", ["state_y"], ["next_y"])]),
    ]
    found = bounds(tmp_path, nodes, SIZES, [number("many", [1 << 30]), number("less", [(1 << 30) - 1])])
    assert "more than 1,048,576 times" in found.reasons[0]


def test_loops_within_loops_that_follow_the_sizes(tmp_path: Path) -> None:
    inner = [
        repeated("rows", [repeated("rows", [node("Neg", ["state_b"], ["next_b"])], "state_a", "b")], "state_y", "a")
    ]
    inner[0].attribute[0].g.node.append(node("Identity", ["b"], ["next_a"]))
    nodes = [
        node("Shape", ["x"], ["rows"], end=1),
        repeated("rows", [*inner, node("Identity", ["a"], ["next_y"])]),
    ]
    assert "more than 2 loops within each other" in bounds(tmp_path, nodes, SIZES).reasons[0]


def test_a_slice_that_ends_before_it_begins_frees_no_memory(tmp_path: Path) -> None:
    nodes = [
        node("Concat", ["x"] * 9, ["wide"], axis=1),
        node("Slice", ["wide", "seven", "three", "one_axis"], ["none"]),
        node("Relu", ["wide"], ["copy"]),
        node("Concat", ["none", "copy"], ["y"], axis=1),
    ]
    constants = [number("seven", [7]), number("three", [3]), number("one_axis", [1])]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("rows", 2))], constants)
    assert found.bounded, found.reasons
    assert found.peak({"rows": 1000}) >= 2 * 4 * 18 * 1000
    assert found.peak({"rows": 1 << 60}) == (1 << 63) - 1  # the largest number that an archive holds


def test_a_tensor_that_a_later_node_of_an_inner_graph_makes(tmp_path: Path) -> None:
    """An engine sorts the nodes: the loop's inner ``size`` is the client's, not the outer one of 3."""
    body = [node("Expand", ["state_y", "size"], ["big"]), node("ReduceMax", ["big"], ["next_y"], keepdims=0)]
    body += [node("Identity", ["n"], ["size"])]
    nodes = [node("Identity", ["three"], ["size"]), repeated("five", body)]
    inputs: Inputs = [("x", FLOAT, ()), ("n", INT64, (1,))]
    found = bounds(tmp_path, nodes, inputs, [number("three", [3]), number("five", 5)])
    assert "made by a later node" in found.reasons[0]


def test_a_tensor_that_is_a_constant_and_an_output(tmp_path: Path) -> None:
    nodes = [node("Constant", [], ["trips"], value_int=3), loop("trips")]
    found = bounds(tmp_path, nodes, [("x", FLOAT, (1,))], [number("trips", 1 << 62)])
    assert found.reasons == ("it defines a tensor twice",)


def test_a_loop_that_nothing_could_end(tmp_path: Path) -> None:
    """ONNX Runtime reads the flag that ends a call before each node, and this body has none."""
    values = [info("i", INT64, []), info("going", BOOL, []), info("state", FLOAT, [1])]
    body = helper.make_graph([], "body", values, values[1:])
    nodes = [node("Loop", ["five", "", "x"], ["y"], body=body)]
    found = bounds(tmp_path, nodes, [("x", FLOAT, (1,))], [number("five", 5)])
    assert "its graph has no nodes" in found.reasons[0]


class TestFunctions:
    """Functions of the file: ``F`` expands x to the shape that its attribute holds."""

    @staticmethod
    def model(folder: Path, default: int, *, domain: str = "ours", opset: int = 20, resize: bool = False) -> Bounds:
        shape = node("Constant", [], ["size"])
        reference = shape.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_ints", "size", onnx.AttributeProto.INTS
        nodes = [node("Resize", ["a", "", "b"], ["c"])] if resize else [shape, node("Expand", ["a", "size"], ["c"])]
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(domain, 1)]
        function = helper.make_function(
            domain,
            "F",
            ["a", "b"],
            ["c"],
            nodes,
            opsets,
            attribute_protos=[] if resize else [helper.make_attribute("size", [default])],
        )
        inputs = [info("x", FLOAT, [1]), info("n", FLOAT, [1])]
        graph = helper.make_graph([node("F", ["x", "n"], ["y"], domain=domain)], "g", inputs, [info("y", FLOAT, None)])
        model_opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
        path = folder / "function.onnx"
        onnx.save(helper.make_model(graph, opset_imports=model_opsets, functions=[function], ir_version=10), path)
        specs = (TensorSpec("x", DType.FP32, (1,)), TensorSpec("n", DType.FP32, (1,)))
        return bounds_of(path, Signature(specs, ()))

    def test_the_default_of_an_attribute(self, tmp_path: Path) -> None:
        found = self.model(tmp_path, 1000)
        assert found.bounded, found.reasons
        assert found.peak({}) >= 4000

    def test_a_function_of_a_built_in_domain(self, tmp_path: Path) -> None:
        found = self.model(tmp_path, 1000, domain="com.microsoft")
        assert "replaces a standard operator" in found.reasons[0]

    def test_a_function_with_its_own_version_of_operators(self, tmp_path: Path) -> None:
        assert "comes from values" in self.model(tmp_path, 1, opset=18, resize=True).reasons[0]
        assert not self.model(tmp_path, 1, opset=10, resize=True).bounded


def harmless(kind: int = FLOAT) -> onnx.ModelProto:
    inputs = [info("x", FLOAT, [1]), info("n", INT64, [1])]
    graph = helper.make_graph([node("Neg", ["x"], ["y"])], "g", inputs, [info("y", kind, [1])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def harmful() -> onnx.ModelProto:
    model = harmless()
    del model.graph.node[:]
    model.graph.node.extend([node("Expand", ["x", "n"], ["y"])])
    return model


def twice(name: str) -> Callable[[], bytes]:
    def made() -> bytes:
        model = harmful()
        model.graph.node[0].input[1] = "size"
        constant = node("Constant", [], ["size"], value_ints=[1 << 40])
        second = constant.attribute.add()
        second.CopyFrom(helper.make_attribute(name, [1]))
        model.graph.node.insert(0, constant)
        return model.SerializeToString()

    return made


def renamed_constant() -> onnx.ModelProto:
    """The shape is the input ``constant?``; there is a constant ``constant!``."""
    model = harmful()
    model.graph.node[0].input[1] = model.graph.input[1].name = "constant?"
    model.graph.initializer.append(number("constant!", [1]))
    return model


FILES: dict[str, Callable[[], bytes]] = {
    "two graphs, which protobuf merges": lambda: harmful().SerializeToString() + harmless().SerializeToString(),
    "an attribute given twice": twice("value_ints"),
    "a constant and an input of names that are equal if read as text": lambda: (
        renamed_constant()
        .SerializeToString()
        .replace(b"constant?", b"constant\xff")
        .replace(b"constant!", b"constant\xfe")
    ),
}


@pytest.mark.parametrize("file", FILES)
def test_files_that_readers_understand_differently(tmp_path: Path, file: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(FILES[file]())
    specs = (TensorSpec("x", DType.FP32, (1,)), TensorSpec("n", DType.INT64, (1,)))
    assert not bounds_of(path, Signature(specs, ())).bounded


def test_a_tensor_that_is_huge_for_all_sizes(tmp_path: Path) -> None:
    found = bounds(tmp_path, [node("Expand", ["x", "size"], ["y"])], [("x", FLOAT, (1,))], [number("size", [1 << 32])])
    assert found.reasons == ("it needs more than 8 GiB whatever the sizes of its inputs are",)


def test_an_empty_tensor_that_gets_any_shape(tmp_path: Path) -> None:
    """[2**40, 0] is empty too, and its product with [0, 1] is not."""
    nodes = [
        node("ConstantOfShape", ["nothing"], ["empty"]),
        node("Reshape", ["empty", "n"], ["tall"]),
        node("MatMul", ["tall", "none_one"], ["y"]),
    ]
    none = numpy_helper.from_array(np.zeros((0, 1), np.float32), "none_one")
    found = bounds(tmp_path, nodes, [("n", INT64, (2,))], [number("nothing", [0]), none])
    assert "its input may be empty" in found.reasons[0]


@pytest.mark.parametrize(
    "made",
    [
        node("AveragePool", ["x"], ["y"], kernel_shape=[1 << 31, 1 << 31], auto_pad="SAME_LOWER"),
        node("TfIdfVectorizer", ["x"], ["y"], mode="TF", max_skip_count=1 << 31, ngram_indexes=[0]),
    ],
    ids=lambda made: str(made.op_type),
)
def test_attributes_that_make_a_call_endless(tmp_path: Path, made: onnx.NodeProto) -> None:
    assert "too" in bounds(tmp_path, [made], [("x", FLOAT, (1, 1, 8, 8))]).reasons[0]


def test_empty_inputs_of_recurrent_operators(tmp_path: Path) -> None:
    """ONNX Runtime's kernels of GRU and LSTM end the process for an empty batch."""
    weights = [numpy_helper.from_array(np.zeros((1, 12, size), np.float32), f"w{size}") for size in (2, 4)]
    recurrent = [node("GRU", ["x", "w2", "w4"], ["y"], hidden_size=4)]
    inputs: Inputs = [("x", FLOAT, ("steps", "batch", 2))]
    assert bounds(tmp_path, recurrent, inputs, weights).bounded
    found = bounds(tmp_path, recurrent, inputs, weights, ranges={"batch": Range(0, None)})
    assert "an empty input ends the process" in found.reasons[0]


CLIENT: Inputs = [("x", FLOAT, ("rows", "columns")), ("s", INT64, (2,)), ("r", INT64, (2,))]
TEXTS: Inputs = [("x", TensorProto.STRING, ("rows", "columns"))]
ROWS: Inputs = [
    ("x", FLOAT, ("rows", "seq", 8)),
    ("r", FLOAT, ("others", "seq", "columns")),
    ("g", FLOAT, ("columns",)),
    ("p", INT64, (1,)),
    ("t", FLOAT, ("rows", "columns")),
    ("w", UINT8, ("columns", 2)),
]
EMPTY = {"columns": Range(0)}
MS = "com.microsoft"
DOUBLED = [node("StringConcat", [f"t{place}" if place else "x"] * 2, [f"t{place + 1}"]) for place in range(20)]
BYTES = numpy_helper.from_array(np.array(["x" * (1 << 20)], object), "text")
# Each fed an endless loop in the server's own process, made a text of gigabytes, or ended the process.
UNSOUND: dict[str, tuple[Attack, str]] = {
    "Unique along an axis of an empty tensor": (
        ([node("Unique", ["x"], ["y"], axis=0)], SIZES, []),
        "an empty input ends the process",
    ),
    "inverses of matrices that are not square": (
        ([node("Inverse", ["x"], ["y"], domain=MS)], SIZES, []),
        "may not be square",
    ),
    "empty rows that are added to others": (
        ([node("SkipLayerNormalization", ["x", "r", "g"], ["y"], domain=MS)], ROWS, []),
        "an empty input ends the process",
    ),
    "keys without a width": (
        ([node("MultiHeadAttention", ["x", "r", "r"], ["y"], domain=MS, num_heads=2)], ROWS, []),
        "an empty input ends the process",
    ),
    "a rotary embedding of no width": (
        ([node("RotaryEmbedding", ["x", "p", "t", "t"], ["y"], domain=MS)], ROWS, []),
        "an empty input ends the process",
    ),
    "windows without samples": (
        ([node("STFT", ["x", "one_step", "g"], ["y"])], ROWS, [number("one_step", 1)]),
        "an empty input ends the process",
    ),
    "more scales than columns": (
        ([node("DynamicQuantizeMatMul", ["t", "w", "g"], ["y"], domain=MS)], ROWS, []),
        "more scales than columns",
    ),
    "texts that double": ((DOUBLED, TEXTS, []), "more than 32 times the bytes of the texts"),
    "a text that each element of an input repeats": (
        (
            [node("Shape", ["n"], ["shape"]), node("Expand", ["x", "shape"], ["y"])],
            [("x", TensorProto.STRING, ()), ("n", FLOAT, ("rows",))],
            [],
        ),
        "repeats texts that a client sends",
    ),
}


@pytest.mark.parametrize("attack", UNSOUND)
def test_graphs_that_were_called_bounded(tmp_path: Path, attack: str) -> None:
    (nodes, inputs, constants), reason = UNSOUND[attack]
    found = bounds(tmp_path, nodes, inputs, constants, ranges=EMPTY)
    assert reason in "; ".join(found.reasons)


def test_a_dimension_whose_name_looks_like_a_sum(tmp_path: Path) -> None:
    """Half of the dimensions a, b and c is another size than half of c and of a dimension called "a + b"."""
    nodes = [
        *[node("Shape", ["x"], [name], start=axis, end=axis + 1) for axis, name in enumerate("abc")],
        node("Shape", ["z"], ["one_name"]),
        node("Add", ["a", "b"], ["both"]),
        *[node("Add", [name, "c"], [f"{name}_c"]) for name in ("both", "one_name")],
        *[node("Div", [f"{name}_c", "two"], [f"{name}_half"]) for name in ("both", "one_name")],
        node("Sub", ["one_name_half", "both_half"], ["difference"]),
        *expanded("difference"),
    ]
    inputs: Inputs = [("x", FLOAT, ("a", "b", "c")), ("z", FLOAT, ("a + b",))]
    found = bounds(tmp_path, nodes, inputs, [number("two", [2]), ONE])
    assert found.bounded, found.reasons
    assert found.peak({"a": 1, "b": 1, "c": 1, "a + b": 1000}) >= 4 * 499


def test_the_memory_of_the_order_in_which_the_engine_runs_the_nodes(tmp_path: Path) -> None:
    """ONNX Runtime runs all of the second chain before the first, which then reads each large tensor again."""
    nodes = []
    for place in range(9):
        nodes += [
            node("Add", ["x", f"c{place}"], [f"large{place}"]),
            *[node(kind, [f"large{place}"], [f"{kind}{place}"]) for kind in ("ReduceMin", "ReduceMax")],
        ]
    for side, kind in enumerate(("ReduceMin", "ReduceMax")):
        nodes += [node("Sum", [f"{kind}{place}" for place in range(9)], [f"end{side}"])]
    nodes += [node("Add", ["end0", "end1"], ["y"])]
    found = bounds(tmp_path, nodes, [("x", FLOAT, ("n",))], [real(f"c{place}", place) for place in range(9)])
    assert found.bounded, found.reasons
    assert found.peak({"n": 1000}) >= 9 * 4000


def test_a_loss_of_fewer_targets_than_scores(tmp_path: Path) -> None:
    """ONNX Runtime returns one loss for one target and ten rows of scores."""
    nodes = [
        node("NegativeLogLikelihoodLoss", ["x", "t"], ["loss"], reduction="none"),
        node("Shape", ["loss"], ["shape"]),
        node("Sub", ["ten", "shape"], ["missing"]),
        *expanded("missing"),
    ]
    found = bounds(tmp_path, nodes, [("x", FLOAT, (10, 3)), ("t", INT64, ("n",))], [number("ten", [10]), ONE])
    assert not found.bounded or found.peak({"n": 1}) >= 4 * 9 + 8


def test_constant_texts_count_with_their_bytes(tmp_path: Path) -> None:
    nodes = [node("Shape", ["x"], ["shape"]), node("Expand", ["text", "shape"], ["y"])]
    found = bounds(tmp_path, nodes, SIZES, [BYTES])
    assert found.peak({"rows": 100, "columns": 3}) >= 300 << 20


def test_a_product_of_sizes_that_the_client_chooses(tmp_path: Path) -> None:
    """[1, n] and [n, 1] have the same elements and bounds, and their sum n * n."""
    nodes = [
        node("Reshape", ["x", "s"], ["row"]),
        node("Reshape", ["x", "r"], ["column"]),
        node("Add", ["row", "column"], ["y"]),
    ]
    found = bounds(tmp_path, nodes, CLIENT)
    assert not found.bounded or found.peak({"rows": 100, "columns": 10}) >= 4 * 1000**2


# Nodes that make y from x of [1, 10], and how many elements it has, which was believed to be less.
WIDER: dict[str, tuple[Sequence[onnx.NodeProto], Sequence[onnx.TensorProto], int]] = {
    "Einsum": ([node("Einsum", ["x", "one"], ["y"], equation="ab,b->b")], [ONE], 10),
    "PRelu": (
        [node("PRelu", ["x", "wide"], ["y"])],
        [numpy_helper.from_array(np.ones((7, 1, 1), np.float32), "wide")],
        70,
    ),
    "Resize": (
        [node("Resize", ["x", "", "scales"], ["y"], mode="nearest")],
        [numpy_helper.from_array(np.array([1, 0.7], np.float32), "scales")],
        7,
    ),
}


@pytest.mark.parametrize("operator", WIDER)
def test_sizes_that_were_believed_too_small(tmp_path: Path, operator: str) -> None:
    nodes, constants, elements = WIDER[operator]
    found = bounds(tmp_path, nodes, [("x", FLOAT, (1, 10))], constants)
    assert found.bounded
    assert found.peak({}) >= 4 * elements


def test_a_dropout_that_trains_changes_values(tmp_path: Path) -> None:
    nodes = [
        node("Dropout", ["four", "half", "yes"], ["dropped"]),
        cast("dropped", "size"),
        node("Expand", ["x", "size"], ["y"]),
    ]
    constants = [
        real("four", 4),
        numpy_helper.from_array(np.array(0.5, np.float32), "half"),
        numpy_helper.from_array(np.array(True), "yes"),
    ]
    assert "comes from values" in bounds(tmp_path, nodes, [("x", FLOAT, (1,))], constants).reasons[0]
