"""Ranges of inputs that are indices, derived from graphs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ingot.bounds.indices import Indices, indices_of
from tests import onnx_models

INT64 = TensorProto.INT64
MS = "com.microsoft"


def node(operator: str, inputs: str, output: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def graph(folder: Path, nodes: list[NodeProto], kind: int = INT64, opset: int = 20) -> Path:
    """Nodes from the indices ``i`` and ``j`` [n, 1] to ``y``; constants ``table`` [10, 4], ``rows`` [10, 1].

    Further inputs are ``x`` [n, 1, 8] and ``boxes`` [n, 4], and a constant is ``images`` [10, 1, 4, 4].
    """
    numbers = {"two": 2, "some": [1, 2], "flat": [-1], "last": [1], "depth": 10, "start": [0], "huge": 2**63 - 1}
    arrays = {name: np.array(value, np.int64) for name, value in numbers.items()}
    arrays |= {
        "table": np.ones((10, 4), np.float32),
        "rows": np.ones((10, 1), np.float32),
        "scale": np.ones(4, np.float32),
        "endless": np.array(np.inf, np.float32),
        "on": np.ones(2, np.float32),
        "size": np.array([2, 2], np.int32),
        "images": np.ones((10, 1, 4, 4), np.float32),
    }
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    types: list[tuple[str, int, onnx_models.Dims]] = [("i", kind, ("n", 1)), ("j", INT64, ("n", 1))]
    types += [("x", TensorProto.FLOAT, ("n", 1, 8)), ("boxes", TensorProto.FLOAT, ("n", 4))]
    unread = [node("Identity", "j", "unread")]
    outputs: list[tuple[str, int, onnx_models.Dims]] = [("y", TensorProto.FLOAT, ())]
    return onnx_models.save(folder / "graph.onnx", [*nodes, *unread], types, outputs, constants, opset)


GATHER = node("Gather", "table k")
BODY = helper.make_graph([GATHER], "body", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
# The sum of two lookups, which ONNX Runtime fuses if it is normalized for an attention.
SUM = [node("Gather", "table i", "a"), node("Gather", "table j", "b"), node("Add", "a b", "k")]
NORMALIZED = node("LayerNormalization", "k scale scale", "normal", axis=-1)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("Gather", "table i")], "-10..9"),
        ([node("Gather", "table i", axis=1)], "-4..3"),
        ([node("Gather", "table i", axis=-1)], "-4..3"),
        ([node("GatherElements", "rows i")], "-10..9"),
        ([node("ScatterElements", "rows i rows")], "-10..9"),
        ([node("GatherND", "table i")], "-10..9"),
        ([node("Cast", "i", "k", to=TensorProto.INT32), GATHER], "-10..9"),
        ([node("Reshape", "i flat", "k"), GATHER], "-10..9"),
        ([node("Squeeze", "i last", "s"), node("Unsqueeze", "s last", "k"), GATHER], "-10..9"),
        ([node("Concat", "i j", "k", axis=1), GATHER], "-10..9"),
        ([node("Add", "i two", "k"), GATHER], "-12..7"),
        ([node("Add", "two i", "k"), GATHER], "-12..7"),
        ([node("Sub", "i two", "k"), GATHER], "-8..11"),
        ([node("Identity", "table", "copy"), node("Gather", "copy i")], "-10..9"),
        ([node("Gather", "table i", "a"), node("Gather", "table i", "b", axis=1), node("Add", "a b")], "-4..3"),
        # Of operators that do not count from the end.
        ([node("RotaryEmbedding", "x i table table", domain=MS, num_heads=1)], "0..9"),
        ([node("MRotaryEmbedding", "x i table table", domain=MS)], "0..9"),
        ([node("RotaryEmbedding", "x table table i", num_heads=1)], "0..9"),
        ([node("Add", "i two", "k"), node("RotaryEmbedding", "x table table k", num_heads=1)], "-2..7"),
        ([node("EmbedLayerNormalization", "i j table rows rows on on", domain=MS)], "0..9"),
        ([node("EmbedLayerNormalization", "j j rows rows rows on on j i", domain=MS)], "0..9"),
        ([node("QEmbedLayerNormalization", "j i rows rows table", domain=MS)], "0..9"),
        ([node("RoiAlign", "images boxes i")], "0..9"),
        ([node("CropAndResize", "images boxes i some", domain=MS)], "0..9"),
        # Of lookups that ONNX Runtime may replace by one of these.
        ([*SUM, NORMALIZED], "0..9"),
        ([*SUM, node("SkipLayerNormalization", "x k scale", domain=MS)], "0..9"),
        ([*SUM, node("Cast", "k", "c", to=1), node("ReduceMean", "c", "m"), node("Sub", "c m")], "0..9"),
        ([*SUM, node("ReduceMean", "k")], "-10..9"),
        ([*SUM, node("Abs", "k", "m"), node("LayerNormalization", "m scale")], "-10..9"),
        ([node("Gather", "images i", "k"), NORMALIZED], "-10..9"),
        # Engines sort nodes.
        ([GATHER, node("Identity", "i", "k")], "-10..9"),
        # One value for each column, values that select only some, and those that are computed otherwise.
        ([node("Add", "i some", "k"), GATHER], None),
        ([node("Sub", "two i", "k"), GATHER], None),
        ([node("Add", "i i", "k"), GATHER], None),
        ([node("Slice", "i start last", "k"), GATHER], None),
        ([node("Abs", "i", "k"), GATHER], None),
        ([node("Where", "c i j", "k"), GATHER], None),
        ([node("Cast", "i", "f", to=TensorProto.FLOAT), node("Cast", "f", "k", to=INT64), GATHER], None),
        ([node("Cast", "i", "f", to=TensorProto.UINT8), node("Cast", "f", "k", to=INT64), GATHER], None),
        ([node("Equal", "i j", "f"), node("Cast", "f", "k", to=INT64), node("Gather", "last k")], None),
        ([node("Gather", "j i")], None),
        # Each index may have several numbers, or stand for those that follow it.
        ([node("Reshape", "i flat", "k"), node("GatherND", "table k")], None),
        ([node("Add", "i huge", "k"), GATHER], None),  # some wrap around
        ([node("Reshape", "i flat", "k"), node("RotaryEmbedding", "x k table table", domain=MS)], None),
        # The limits of lengths and places depend on more than one size.
        ([node("ReverseSequence", "x i")], None),
        ([node("Attention", "x x x j j j i")], None),
        ([node("GroupQueryAttention", "x x x x x i j", domain=MS)], None),
        ([node("NegativeLogLikelihoodLoss", "x i")], None),
        ([node("Identity", "i", "k"), helper.make_node("If", ["c"], ["y"], then_branch=BODY, else_branch=BODY)], None),
    ],
)
def test_the_range_of_an_index_follows_from_what_it_selects_from(
    tmp_path: Path, nodes: list[NodeProto], expected: str | None
) -> None:
    found = indices_of(graph(tmp_path, nodes))
    if expected is not None:
        assert str(found.ranges["i"]) == expected
        assert "i" not in found.unknown
        assert "it selects from" in str(found.ranges["i"].source)
    else:
        assert "i" not in found.ranges
        assert "node" in found.unknown["i"]


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Shape", "i", "k"), GATHER],  # no value of the input is an index
        [node("Greater", "i two", "f"), node("NonZero", "f", "k"), node("GatherND", "table k")],  # as in x[i > 2]
        [node("ArgMax", "i", "k"), GATHER],
        [node("Cast", "i", "f", to=TensorProto.BOOL), node("Cast", "f", "k", to=INT64), GATHER],
        [node("OneHot", "i depth on")],  # accepts any index
        [node("OneHot", "i endless on")],
        [node("Gather", "table i", domain="own")],  # another operator
        [node("Gather", "table")],  # not valid
    ],
)
def test_values_that_are_not_indices_have_no_range(tmp_path: Path, nodes: list[NodeProto]) -> None:
    for lenient in (False, True) if "endless" in nodes[0].input else (False,):
        found = indices_of(graph(tmp_path, nodes), lenient=lenient)
        assert "i" not in found.ranges
        assert "i" not in found.unknown


def test_a_caller_that_tries_values_also_learns_of_one_hot(tmp_path: Path) -> None:
    assert str(indices_of(graph(tmp_path, [node("OneHot", "i depth on")]), lenient=True).ranges["i"]) == "-10..9"


def test_only_a_caller_that_tries_values_believes_the_sizes_of_results(tmp_path: Path) -> None:
    path = onnx_models.described_wrongly(tmp_path)
    assert indices_of(path).ranges == {}
    assert indices_of(path).unknown.keys() == {"ids"}
    assert str(indices_of(path, lenient=True).ranges["ids"]) == "-1..0"


def test_a_range_has_the_limits_of_the_datatype(tmp_path: Path) -> None:
    nodes = [node("Cast", "i", "k", to=INT64), GATHER]
    assert str(indices_of(graph(tmp_path, nodes, TensorProto.UINT8)).ranges["i"]) == "0..9"


@pytest.mark.parametrize(
    ("operator", "domain", "inputs", "body"),
    [
        ("Lookup", "own", "i", [node("Gather", "t a", "b")]),
        ("Gather", "own", "table i", [node("Mod", "c a", "d"), node("Gather", "a d", "b")]),
        ("Gather", MS, "table i", [node("Mod", "c a", "d"), node("Gather", "a d", "b")]),
        ("Cast", "own", "table", [node("Slice", "a c a", "b")]),
        ("Cast", MS, "table", [node("Slice", "a c a", "b")]),
        ("QuantizeLinear", MS, "table", [node("Slice", "a c a", "b")]),
        ("Shape", "own", "i", [node("Abs", "a", "b")]),
        ("Constant", "own", "i", [node("Abs", "a", "b")]),
        ("Identity", "own", "i", [node("Abs", "a", "b")]),
    ],
)
def test_a_function_of_the_file_may_have_any_name(
    tmp_path: Path, operator: str, domain: str, inputs: str, body: list[NodeProto]
) -> None:
    called = node(operator, inputs, "k", domain=domain)
    path = graph(tmp_path, [called, node("Gather", "k i" if inputs == "table" else "table k")])
    model = onnx.load(path)
    imports = [helper.make_opsetid("", 20)]
    names = ["a", "c"][: len(inputs.split())]
    table = helper.make_node("Constant", [], ["t"], value=numpy_helper.from_array(np.ones((10, 4), np.float32)))
    model.functions.append(helper.make_function(domain, operator, names, ["b"], [table, *body], imports))
    onnx.save(model, path)
    assert indices_of(path).unknown.keys() == {"i"}


def test_a_graph_inside_may_have_names_of_the_graph_outside(tmp_path: Path) -> None:
    bodies = [
        helper.make_graph(
            [node("Identity", "i", "k"), node("Identity", "k", "o")],
            "body",
            [],
            [helper.make_tensor_value_info("o", INT64, None)],
        )
        for _ in range(2)
    ]
    chosen = helper.make_node("If", ["c"], ["m"], then_branch=bodies[0], else_branch=bodies[1])
    assert indices_of(graph(tmp_path, [chosen, node("Identity", "m", "k"), GATHER])).unknown.keys() == {"i"}


def layers(folder: Path, count: int) -> Path:
    """All sums of the first powers of two are added to the index."""
    nodes, name = list[NodeProto](), "i"
    for at in range(count):
        constant = numpy_helper.from_array(np.array(2**at))
        nodes += [helper.make_node("Constant", [], [f"c{at}"], value=constant), node("Add", f"{name} c{at}", f"a{at}")]
        nodes += [node("Concat", f"{name} a{at}", f"k{at}", axis=0)]
        name = f"k{at}"
    return graph(folder, [*nodes, node("Gather", f"table {name}")])


def chain(folder: Path, count: int, step: str = "Abs") -> Path:
    """Many nodes select by the result of many."""
    steps = [node(step, f"k{at - 1}" if at else "i", f"k{at}") for at in range(count)]
    return graph(folder, [*steps, *(node("Gather", f"table k{count - 1}", f"y{at}") for at in range(count))])


def calls(folder: Path, count: int) -> Path:
    """A function of many nodes is called often."""
    path = graph(folder, [node("Own", f"k{at - 1}" if at else "i", f"k{at}", domain="own") for at in range(count)])
    model = onnx.load(path)
    body = [node("Abs", f"k{at - 1}" if at else "a", f"k{at}") for at in range(count)]
    imports = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("own", "Own", ["a"], [f"k{count - 1}"], body, imports))
    onnx.save(model, path)
    return path


def test_what_is_added_on_several_ways_limits_the_index_together(tmp_path: Path) -> None:
    assert str(indices_of(layers(tmp_path, 3)).ranges["i"]) == "-10..2"  # 0 to 7 are added


@pytest.mark.parametrize(
    ("build", "size"), [(layers, 8), (chain, 100), (partial(chain, step="Identity"), 100), (calls, 100)]
)
def test_the_work_grows_with_the_size_of_the_file(
    tmp_path: Path, build: Callable[[Path, int], Path], size: int
) -> None:
    """Anybody may have made the file."""
    done = []
    for count in (size, 2 * size):
        path, events = build(tmp_path, count), Counter[str]()
        sys.setprofile(lambda frame, event, argument, events=events: events.update([event]))  # type: ignore[misc]
        try:
            indices_of(path)
        finally:
            sys.setprofile(None)
        done.append(events["call"] + events["c_call"])
    assert done[1] < 2.2 * done[0]


def test_a_damaged_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(b"\x3a\xff")
    assert indices_of(path) == Indices()


def fused(folder: Path) -> Path:
    """An encoder of which ONNX Runtime replaces the lookups of words (of 10) and segments (of 2), both [1, 4]."""
    sizes = {"words": (10, 8), "places": (4, 8), "segments": (2, 8), "scale": (8,), "weights": (8, 24), "bias": (24,)}
    arrays: dict[str, Any] = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    arrays |= {"place": np.arange(4)[None], "last": np.array([1])}
    nodes = [
        node("Gather", "words i", "word"),
        node("Gather", "places place", "placed"),
        node("Gather", "segments j", "segment"),
        node("Add", "word placed", "both"),
        node("Add", "both segment", "all"),
        node("LayerNormalization", "all scale scale", "normal", axis=-1),
        node("ReduceSum", "mask last", "sums", keepdims=0),
        node("Cast", "sums", "kept", to=TensorProto.INT32),
        node("Attention", "normal weights bias kept", "attended", domain=MS, num_heads=2),
        node("Add", "attended normal"),
    ]
    inputs: list[tuple[str, int, onnx_models.Dims]] = [(name, INT64, (1, 4)) for name in ("i", "j", "mask")]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    outputs: list[tuple[str, int, onnx_models.Dims]] = [("y", TensorProto.FLOAT, (1, 4, 8))]
    return onnx_models.save(folder / "fused.onnx", nodes, inputs, outputs, constants, 17)


BUILDS: list[Callable[[Path], Path]] = [
    onnx_models.lookup,
    onnx_models.embeddings,
    partial(graph, nodes=[node("RotaryEmbedding", "x i table table", domain=MS, num_heads=1)]),
    partial(graph, nodes=[node("RotaryEmbedding", "x table table i", num_heads=1)], opset=23),
    partial(graph, nodes=[node("Squeeze", "i last", "k"), node("RoiAlign", "images boxes k")]),
    partial(
        graph,
        nodes=[node("Squeeze", "i last", "k"), node("CropAndResize", "images boxes k size", domain=MS)],
        kind=TensorProto.INT32,
    ),
    fused,
]


@pytest.mark.parametrize("build", BUILDS)
def test_engines_accept_both_ends_and_nothing_beyond(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    path = build(tmp_path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
    inputs = {
        item.name: np.zeros([size if isinstance(size, int) else 1 for size in item.shape], kinds[item.type])
        for item in session.get_inputs()
    }
    ranges = indices_of(path).ranges
    assert ranges
    for name, span in ranges.items():
        assert span.low is not None
        assert span.high is not None
        for value, fits in ((span.low - 1, False), (span.low, True), (span.high, True), (span.high + 1, False)):
            given = np.full_like(inputs[name], value)
            try:
                session.run(None, {**inputs, name: given})
                accepted = True
            except Exception:  # noqa: BLE001 - its errors have no common class
                accepted = False
            assert accepted is fits
            assert (span.outside(given) is None) is fits


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.INT8])
@pytest.mark.parametrize("operator", ["Add", "Sub", "Identity"])
@pytest.mark.parametrize("size", [10, 128, 256, 300])
def test_engines_refuse_the_values_beyond_a_range_and_no_others(
    tmp_path: Path, kind: int, operator: str, size: int
) -> None:
    """Also if sums wrap around: then there is no range, except if all values select."""
    numpy_type = helper.tensor_dtype_to_np_dtype(kind)
    constants = [np.array(120, numpy_type), np.ones(size, np.float32)]
    read = ["i", "shift"][: 1 if operator == "Identity" else 2]
    nodes = [helper.make_node(operator, read, ["k"]), node("Cast", "k", "c", to=INT64), node("Gather", "table c")]
    path = onnx_models.save(
        tmp_path / "graph.onnx",
        nodes,
        [("i", kind, ("n",))],
        [("y", TensorProto.FLOAT, ("n",))],
        [numpy_helper.from_array(array, name) for array, name in zip(constants, ("shift", "table"), strict=True)],
    )
    session, limits = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]), np.iinfo(numpy_type)
    accepted = []
    for value in range(limits.min, limits.max + 1):
        try:
            session.run(None, {"i": np.array([value], numpy_type)})
            accepted.append(value)
        except Exception:  # noqa: BLE001 - its errors have no common class
            continue
    found = indices_of(path)
    if "i" in found.ranges:
        span = found.ranges["i"]
        assert accepted == list(range(int(span.low or 0), int(span.high or 0) + 1))
    else:
        assert ("i" in found.unknown) is (len(accepted) < 256)
