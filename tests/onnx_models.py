"""Small ONNX models for tests of serving, built by hand without an exporter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.tensors import DType

Dims = Sequence[int | str]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Dims]],
    outputs: Sequence[tuple[str, int, Dims]],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 20,
    described: Sequence[onnx.ValueInfoProto] = (),
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        path.stem,
        [helper.make_tensor_value_info(name, kind, list(dims)) for name, kind, dims in inputs],
        [helper.make_tensor_value_info(name, kind, list(dims)) for name, kind, dims in outputs],
        list(constants),
    )
    graph.value_info.extend(described)
    domains = {"": opset, **{node.domain: 1 for node in nodes if node.domain}}
    imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def identity(folder: Path, dtype: DType) -> Path:
    """y = x, of any datatype, [batch, 2]; the file is called identity-<datatype>."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    shape: Dims = ("batch", 2)
    path = folder / f"identity-{dtype.value.lower()}.onnx"
    return save(path, nodes, [("x", dtype.onnx, shape)], [("y", dtype.onnx, shape)])


def affine(folder: Path, name: str = "affine") -> Path:
    """y = 2 x + 1, z = -x: FP32 [batch, 3]."""
    constants = [
        numpy_helper.from_array(np.array(value, np.float32), label) for label, value in (("two", 2), ("one", 1))
    ]
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["scaled"]),
        helper.make_node("Add", ["scaled", "one"], ["y"]),
        helper.make_node("Neg", ["x"], ["z"]),
    ]
    shape: Dims = ("batch", 3)
    kind = TensorProto.FLOAT
    return save(
        folder / f"{name}.onnx", nodes, [("x", kind, shape)], [("y", kind, shape), ("z", kind, shape)], constants
    )


def embedding(folder: Path) -> Path:
    """y = table[abs(ids)], 10 rows of 2: an id of 10 or more fails while the engine runs."""
    return _lookup(folder / "embedding.onnx", [helper.make_node("Abs", ["ids"], ["rows"])], "rows")


def lookup(folder: Path, size: int = 10) -> Path:
    """y = table[ids], rows of 2: the range of the ids follows from the graph."""
    return _lookup(folder / "lookup.onnx", [], "ids", size)


def described_wrongly(folder: Path) -> Path:
    """y = x[ids], rows of x: FP32 [n, 2], of which the file says that a copy has a single one."""
    nodes = [helper.make_node("Identity", ["x"], ["copy"]), helper.make_node("Gather", ["copy", "ids"], ["y"])]
    inputs: list[tuple[str, int, Dims]] = [("x", TensorProto.FLOAT, ("n", 2)), ("ids", TensorProto.INT64, ("k",))]
    described = [helper.make_tensor_value_info("copy", TensorProto.FLOAT, [1, 2])]
    outputs: list[tuple[str, int, Dims]] = [("y", TensorProto.FLOAT, ("k", 2))]
    return save(folder / "described.onnx", nodes, inputs, outputs, described=described)


def embeddings(folder: Path) -> Path:
    """The sum of rows of three tables, normalized: INT32 words (of 10), segments (of 2), places (of 5): [batch, 3]."""
    sizes = {"word_table": (10, 4), "place_table": (5, 4), "segment_table": (2, 4), "scale": (4,), "bias": (4,)}
    constants = [numpy_helper.from_array(np.ones(size, np.float32), name) for name, size in sizes.items()]
    read = ["words", "segments", *sizes, "", "places"]
    node = helper.make_node("EmbedLayerNormalization", read, ["y", "mask"], domain="com.microsoft")
    inputs = [(name, TensorProto.INT32, ("batch", 3)) for name in ("words", "segments", "places")]
    return save(folder / "embeddings.onnx", [node], inputs, [("y", TensorProto.FLOAT, ("batch", 3, 4))], constants)


def _lookup(path: Path, nodes: list[onnx.NodeProto], rows: str, size: int = 10) -> Path:
    table = numpy_helper.from_array(np.arange(2 * size, dtype=np.float32).reshape(size, 2), "table")
    inputs = [("ids", TensorProto.INT64, ("batch", "seq"))]
    outputs = [("y", TensorProto.FLOAT, ("batch", "seq", 2))]
    return save(path, [*nodes, helper.make_node("Gather", ["table", rows], ["y"])], inputs, outputs, [table])


def pair(folder: Path) -> Path:
    """y = a + b: FP32, both [batch, seq]."""
    kind, shape = TensorProto.FLOAT, ("batch", "seq")
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    return save(folder / "pair.onnx", nodes, [("a", kind, shape), ("b", kind, shape)], [("y", kind, shape)])


def reciprocal(folder: Path) -> Path:
    """y = 1 / x: FP32 [batch, 1]; zero gives infinity."""
    kind, shape = TensorProto.FLOAT, ("batch", 1)
    nodes = [helper.make_node("Reciprocal", ["x"], ["y"])]
    return save(folder / "reciprocal.onnx", nodes, [("x", kind, shape)], [("y", kind, shape)])


def quotient(folder: Path) -> Path:
    """y = x / d: INT64, both [batch, 2]; a divisor of zero fails while the engine runs."""
    kind, shape = TensorProto.INT64, ("batch", 2)
    nodes = [helper.make_node("Div", ["x", "d"], ["y"])]
    return save(folder / "quotient.onnx", nodes, [("x", kind, shape), ("d", kind, shape)], [("y", kind, shape)])


def reshaped(folder: Path) -> Path:
    """y = x in the shape that is asked for: FP32 [n], INT64 [rank]; a shape of another size fails while it runs."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs: list[tuple[str, int, Dims]] = [("x", TensorProto.FLOAT, ("n",)), ("shape", TensorProto.INT64, (2,))]
    return save(folder / "reshaped.onnx", nodes, inputs, [("y", TensorProto.FLOAT, ("p", "q"))])


def unbatched(folder: Path) -> Path:
    """y = x - mean(x): FP32 [n_points]; rows affect each other, and the file does not declare a batch."""
    kind = TensorProto.FLOAT
    nodes = [helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=1), helper.make_node("Sub", ["x", "mean"], ["y"])]
    return save(folder / "unbatched.onnx", nodes, [("x", kind, ("points",))], [("y", kind, ("points",))])


def picture(folder: Path) -> Path:
    """y = the sums of the rows of a picture: FP32 [batch, 1, 8, 8] to [batch, 8]."""
    axes = numpy_helper.from_array(np.array([1, 3], np.int64), "axes")
    node = helper.make_node("ReduceSum", ["image", "axes"], ["y"], keepdims=0)
    inputs: list[tuple[str, int, Dims]] = [("image", TensorProto.FLOAT, ("batch", 1, 8, 8))]
    return save(folder / "picture.onnx", [node], inputs, [("y", TensorProto.FLOAT, ("batch", 8))], [axes])


def held(folder: Path) -> Path:
    """y = x + 1, FP32 [batch, width], which waits at a gate of :mod:`tests.server.gates`."""
    one = numpy_helper.from_array(np.array(1, np.float32), "one")
    kind, shape = TensorProto.FLOAT, ("batch", "width")
    node = helper.make_node("Add", ["x", "one"], ["y"])
    return save(folder / "held.onnx", [node], [("x", kind, shape)], [("y", kind, shape)], [one])


def slow(folder: Path, repeats: int = 40) -> Path:
    """y = x after many large matrix products: a request takes about a second. FP32 [batch, 1024]."""
    size = 1024
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((size, size)).astype(np.float32) / size, "weight")
    names = ["x", *(f"h{index}" for index in range(repeats - 1)), "y"]
    nodes = [helper.make_node("MatMul", [left, "weight"], [right]) for left, right in pairwise(names)]
    kind, shape = TensorProto.FLOAT, ("batch", size)
    return save(folder / "slow.onnx", nodes, [("x", kind, shape)], [("y", kind, shape)], [weight])


def endless_load(path: Path) -> Path:
    """A graph of 3 KB whose load never ends: 40 functions, each of which calls the one before it twice."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = []
    for number in range(40):
        nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
        if number:
            called = f"F{number - 1}"
            nodes = [helper.make_node(called, [a], [b], domain="f") for a, b in (("x", "half"), ("half", "y"))]
        functions.append(helper.make_function("f", f"F{number}", ["x"], ["y"], nodes, opsets))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    last = helper.make_node("F39", ["x"], ["y"], domain="f")
    graph = helper.make_graph([last], path.stem, values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8), path)
    return path


def endless_run(path: Path) -> Path:
    """A graph that loads at once, with a loop of 2**62 rounds that never ends."""
    kept, added = helper.make_node("Identity", ["go"], ["goes"]), helper.make_node("Add", ["v", "v"], ["sum"])
    kinds = {"i": TensorProto.INT64, "go": TensorProto.BOOL, "v": TensorProto.FLOAT}
    values = {name: helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()}
    results = [
        helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
        helper.make_tensor_value_info("sum", TensorProto.FLOAT, []),
    ]
    body = helper.make_graph([kept, added], "body", list(values.values()), results)
    nodes = [
        helper.make_node("Loop", ["rounds", "true", "one"], ["last"], body=body),
        helper.make_node("Add", ["x", "last"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array(value), name)
        for name, value in (("rounds", np.int64(2**62)), ("true", np.bool_(True)), ("one", np.float32(1)))
    ]
    shape: Dims = ("batch", 3)
    return save(path, nodes, [("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)], constants)


def counting(folder: Path, name: str = "counting") -> Path:
    """y = n, counted by a loop of n rounds: INT64 [1]; with 2**62 it never ends."""
    nodes = [helper.make_node("Identity", ["go"], ["goes"]), helper.make_node("Add", ["v", "one"], ["sum"])]
    whole, flag = TensorProto.INT64, TensorProto.BOOL
    values = [helper.make_tensor_value_info(*item) for item in (("i", whole, []), ("go", flag, []), ("v", whole, [1]))]
    results = [helper.make_tensor_value_info("goes", flag, []), helper.make_tensor_value_info("sum", whole, [1])]
    body = helper.make_graph(nodes, "body", values, results)
    loop = helper.make_node("Loop", ["n", "true", "zero"], ["y"], body=body)
    constants = [
        numpy_helper.from_array(np.array(value), label)
        for label, value in (("true", np.bool_(True)), ("zero", np.array([0])), ("one", np.array([1])))
    ]
    return save(folder / f"{name}.onnx", [loop], [("n", whole, (1,))], [("y", whole, (1,))], constants)


def distinct(folder: Path) -> Path:
    """y = the distinct rows of x: FP32, both [rows, columns]; ONNX Runtime ends the process if x is [3, 0]."""
    kind = TensorProto.FLOAT
    nodes = [helper.make_node("Unique", ["x"], ["y"], axis=0)]
    return save(
        folder / "distinct.onnx", nodes, [("x", kind, ("rows", "columns"))], [("y", kind, ("found", "columns"))]
    )


def repeated(folder: Path) -> Path:
    """y = the number of n texts of 4 MiB that a loop makes: INT64 [1] to INT64 []; its memory grows until it ends."""
    nodes = [
        helper.make_node("Identity", ["go"], ["goes"]),
        helper.make_node("StringConcat", ["text", "text"], ["made"]),
    ]
    whole, flag, text = TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
    values = [helper.make_tensor_value_info("i", whole, []), helper.make_tensor_value_info("go", flag, [])]
    results = [helper.make_tensor_value_info("goes", flag, []), helper.make_tensor_value_info("made", text, [1])]
    body = helper.make_graph(nodes, "body", values, results)
    loop = [helper.make_node("Loop", ["n", ""], ["texts"], body=body), helper.make_node("Size", ["texts"], ["y"])]
    constants = [numpy_helper.from_array(np.array(["x" * (2 << 20)], object), "text")]
    return save(folder / "repeated.onnx", loop, [("n", whole, (1,))], [("y", whole, ())], constants)


def filled(folder: Path) -> Path:
    """y = a tensor of n float32 ones; INT64 [1] to FP32 [size]: a few bytes ask for any amount of memory."""
    one = numpy_helper.from_array(np.array([1], np.float32), "unused")
    node = helper.make_node("ConstantOfShape", ["n"], ["y"], value=one)
    return save(folder / "filled.onnx", [node], [("n", TensorProto.INT64, (1,))], [("y", TensorProto.FLOAT, ("size",))])


def inflated(folder: Path) -> Path:
    """y = the largest of n float32 ones: INT64 [1] to FP32 []; they take 4 n bytes during the call."""
    nodes = [
        helper.make_node("Expand", ["one", "n"], ["ones"]),
        helper.make_node("ReduceMax", ["ones"], ["y"], keepdims=0),
    ]
    one = numpy_helper.from_array(np.array([1], np.float32), "one")
    inputs: list[tuple[str, int, Dims]] = [("n", TensorProto.INT64, (1,))]
    return save(folder / "inflated.onnx", nodes, inputs, [("y", TensorProto.FLOAT, ())], [one])


def squared(folder: Path) -> Path:
    """y = the largest product of two values of x: FP32 [batch, n] to [batch]; a sample takes 4 n^2 bytes and more."""
    axes = [numpy_helper.from_array(np.array([axis]), f"axis{axis}") for axis in (1, 2)]
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis1"], ["rows"]),
        helper.make_node("Unsqueeze", ["x", "axis2"], ["columns"]),
        helper.make_node("Mul", ["rows", "columns"], ["products"]),
        helper.make_node("ReduceMax", ["products", "both"], ["y"], keepdims=0),
    ]
    constants = [*axes, numpy_helper.from_array(np.array([1, 2]), "both")]
    kind = TensorProto.FLOAT
    return save(
        folder / "squared.onnx", nodes, [("x", kind, ("batch", "n"))], [("y", kind, ("batch",))], constants, opset=18
    )


def sized(folder: Path, operator: str) -> Path:
    """y = n values that one operator makes: INT64 [1] to FP32 [1, n]."""
    nodes = {
        "ConstantOfShape": [helper.make_node("ConstantOfShape", ["n"], ["made"])],
        "Expand": [helper.make_node("Expand", ["one", "n"], ["made"])],
        "OneHot": [helper.make_node("OneHot", ["index", "n", "sides"], ["made"], axis=-1)],
        "Range": [helper.make_node("Range", ["zero", "n", "step"], ["whole"]), _cast("whole", "made")],
        "Resize": [
            helper.make_node("Concat", ["units", "n"], ["sizes"], axis=0),
            helper.make_node("Resize", ["line", "", "", "sizes"], ["made"]),
        ],
        "Tile": [helper.make_node("Tile", ["one", "n"], ["made"])],
    }[operator]
    values = {
        "flat": np.array([1, -1]),
        "index": np.array([0]),
        "line": np.ones((1, 1, 1), np.float32),
        "one": np.ones(1, np.float32),
        "sides": np.array([0, 1], np.float32),
        "step": np.array([1]),
        "units": np.array([1, 1]),
        "zero": np.array([0]),
    }
    nodes.append(helper.make_node("Reshape", ["made", "flat"], ["y"]))
    used = {name for node in nodes for name in node.input}
    constants = [numpy_helper.from_array(value, name) for name, value in values.items() if name in used]
    inputs: list[tuple[str, int, Dims]] = [("n", TensorProto.INT64, (1,))]
    return save(folder / "sized.onnx", nodes, inputs, [("y", TensorProto.FLOAT, (1, "size"))], constants)


def _cast(name: str, result: str) -> onnx.NodeProto:
    return helper.make_node("Cast", [name], [result], to=TensorProto.FLOAT)


def running_sum(folder: Path) -> Path:
    """FP32, two states: total [batch, 3], past [batch, seen, 3].

    y = total_next = total + x; past_next has x behind past; n is the sum of past_next, so it equals y in a sequence.
    """
    kind = TensorProto.FLOAT
    axis = numpy_helper.from_array(np.array([1], np.int64), "axis")
    nodes = [
        helper.make_node("Add", ["total", "x"], ["total_next"]),
        helper.make_node("Identity", ["total_next"], ["y"]),
        helper.make_node("Unsqueeze", ["x", "axis"], ["row"]),
        helper.make_node("Concat", ["past", "row"], ["past_next"], axis=1),
        helper.make_node("ReduceSum", ["past_next", "axis"], ["n"], keepdims=0),
    ]
    row, past, more = ("batch", 3), ("batch", "seen", 3), ("batch", "more", 3)
    inputs = [("x", kind, row), ("total", kind, row), ("past", kind, past)]
    outputs = [("y", kind, row), ("n", kind, row), ("total_next", kind, row), ("past_next", kind, more)]
    return save(folder / "running_sum.onnx", nodes, inputs, outputs, [axis])


def stepper(folder: Path) -> Path:
    """n_next = n + 1: INT64 [batch, 1]; y = total_next = total + n_next, with the state total; done = n_next >= 5."""
    constants = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("one", 1), ("five", 5))]
    nodes = [
        helper.make_node("Add", ["n", "one"], ["n_next"]),
        helper.make_node("Add", ["total", "n_next"], ["total_next"]),
        helper.make_node("Identity", ["total_next"], ["y"]),
        helper.make_node("GreaterOrEqual", ["n_next", "five"], ["done"]),
    ]
    kind, shape = TensorProto.INT64, ("batch", 1)
    outputs = [(name, kind, shape) for name in ("y", "n_next", "total_next")]
    inputs = [("n", kind, shape), ("total", kind, shape)]
    path = folder / "stepper.onnx"
    return save(path, nodes, inputs, [*outputs, ("done", TensorProto.BOOL, shape)], constants)


def matmuls(path: Path, width: int, count: int) -> Path:
    """y = x multiplied by a matrix of ones so many times: FP32 [batch, width]."""
    kind, shape = TensorProto.FLOAT, ("batch", width)
    values = ["x", *(f"h{index}" for index in range(1, count)), "y"]
    nodes = [helper.make_node("MatMul", [value, "W"], [product]) for value, product in pairwise(values)]
    constant = numpy_helper.from_array(np.ones((width, width), np.float32), "W")
    return save(path, nodes, [("x", kind, shape)], [("y", kind, shape)], [constant])
