"""Half precision in ONNX graphs: weights and activations in 16 bits where that loses little.

The choice of operators follows PyTorch's autocast:

- Matrix products, convolutions and embeddings are always converted.
- Elementwise operators, and those that only move elements, are converted if all their activations are in half.
- All others stay in float32: reductions, norms and softmax, which add up many numbers; ``Pow``, ``Exp``, ``Sqrt`` and
  the like, which leave float16's range; ``Resize``, ``Range`` and others that compute positions; operators of domains
  other than ONNX's; and the bodies of ``If``, ``Loop`` and functions.
- Recurrent layers stay in float32 as well: in float16, they made ONNX Runtime 1.31 end the process while it loaded a
  graph on a CPU (a fault of MatmulTransposeFusion).
- A node stays in float32 if one of its constants becomes infinite in half, or is a single number that becomes zero.

The model's inputs and outputs stay as they are, with casts next to them.

Only operators for which ONNX Runtime has CUDA kernels are converted. On a CPU, ONNX Runtime (measured with 1.31) runs
most float16 operators in float32 between casts, and removes some of the casts: the graph is slower than in float32, and
rounds less often than on a GPU. Most bfloat16 operators are refused. Accuracy is therefore measured on
:func:`emulated`, a float32 graph that rounds where the GPU would. :func:`stored` is for CPUs: half the size on disk,
float32's speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.graph import layers
from ingot.quant.graph.layers import constant, tensor
from ingot.quant.schemes import edit, half_graph


def _table(rows: Mapping[int, str]) -> Mapping[str, int]:
    return {operator: since for since, operators in rows.items() for operator in operators.split()}


_NEVER = 1 << 30
# Operators by the first operator set in which ONNX Runtime has a CUDA kernel for bfloat16. All have one for float16.
_PRODUCTS = _table({13: "MatMul Gemm", 22: "Conv", _NEVER: "ConvTranspose Einsum"})
_ELEMENTWISE = _table(
    {
        13: "Add Sub Mul Div Neg Min Max Sum Relu Sigmoid Tanh Erf",
        16: "Where",
        20: "Gelu",
        22: "HardSigmoid HardSwish AveragePool",
        _NEVER: "LeakyRelu PRelu Elu Clip MaxPool GlobalMaxPool",
    }
)
_MOVING = _table(
    {
        13: "Reshape Transpose Squeeze Unsqueeze Flatten Slice Split Concat Expand Identity Tile "
        "Gather GatherElements GatherND ScatterElements ScatterND",
        _NEVER: "Pad DepthToSpace SpaceToDepth",
    }
)
_SUPPORTED: Mapping[str, int] = {**_PRODUCTS, **_ELEMENTWISE, **_MOVING}
_TYPES: Mapping[ir.DataType, str] = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
# The largest finite number of each. In bfloat16, even float32's largest number becomes infinite.
_LARGEST: Mapping[ir.DataType, float] = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.3895313892515355e38}
# Smaller weights are not worth a cast.
_STORED_ELEMENTS = 1024


@dataclass(frozen=True)
class Halved:
    """The changes of a graph.

    Attributes:
        operators: the number of nodes of each operator that were converted.
        notes: which layers had to stay in float32, and why.
    """

    operators: Mapping[str, int]
    notes: tuple[str, ...] = ()


def apply(model: ir.Model, dtype: ir.DataType, keep: Collection[ir.Node] = ()) -> Halved:
    """Convert a model to half precision in place; it then needs a GPU, see the module's description.

    Weights are converted one by one when they are read, so models may be larger than the memory.

    Args:
        model: its graph's inputs and outputs keep their types.
        dtype: ``FLOAT16`` or ``BFLOAT16``.
        keep: nodes of the main graph that stay in float32.

    Raises:
        InvalidArgument: ``dtype`` is not a half precision.
        QuantizationError: no matrix product, convolution or embedding can be converted.
    """
    return _convert(model, dtype, keep, half_graph.Writer)


def emulated(model: ir.Model, dtype: ir.DataType, keep: Collection[ir.Node] = ()) -> Halved:
    """Change a model in place to compute the same as :func:`apply` on a GPU, up to the order of sums.

    Everything stays in float32; weights and the results of operators are rounded to ``dtype``. It is for measuring
    accuracy, not for serving. The arguments and errors are those of :func:`apply`.
    """
    return _convert(model, dtype, keep, half_graph.Emulator)


def stored(model: ir.Model, dtype: ir.DataType, keep: Collection[ir.Node] = ()) -> Halved:
    """Store a model's weights in half precision in place, to be cast to float32 when a session loads them.

    Half the size on disk; speed and memory are those of float32, and it runs on every device.

    Args:
        model: its graph's inputs and outputs keep their types.
        dtype: ``FLOAT16`` or ``BFLOAT16``.
        keep: nodes of the main graph whose weights stay in float32.

    Raises:
        InvalidArgument: ``dtype`` is not a half precision.
        QuantizationError: there are no weights that could be stored so.
    """
    _check(dtype)
    LiftConstantsToInitializersPass(size_limit=_STORED_ELEMENTS)(model)
    graph, kept, notes = model.graph, set(keep), []
    counts: Counter[str] = Counter()
    names = half_graph.Names(model)
    for value in list(graph.initializers.values()):
        held = value.const_value
        if held is None or held.dtype != ir.DataType.FLOAT or held.size < _STORED_ELEMENTS or not constant(value):
            continue
        if value.is_graph_output() or not value.uses() or any(user in kept for user, _ in value.uses()):
            continue
        if not _survives(held, dtype):
            notes.append(f"'{value.name}' stays in float32: it holds numbers beyond {_TYPES[dtype]}")
            continue
        counts.update({user.op_type for user, _ in value.uses()})
        half = half_graph.take_place(graph, value, dtype, names)
        name = names.new(f"{half.name}_float")
        widen = edit.Operation("Cast", (half,), name, ir.DataType.FLOAT, attributes={"to": int(ir.DataType.FLOAT)})
        cast = edit.insert_after(graph, half, widen)
        for user, place in list(value.uses()):
            user.replace_input_with(place, cast)
    if not counts:
        raise QuantizationError(
            f"the model has no float32 weights of {_STORED_ELEMENTS} or more elements to store in half precision"
            f"{', but for those to keep' if kept else ''}"
        )
    return Halved(dict(counts), tuple(notes))


def _convert(model: ir.Model, dtype: ir.DataType, keep: Collection[ir.Node], writer: type[half_graph.Writer]) -> Halved:
    _check(dtype)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if any(value.dtype is None for node in model.graph for value in node.outputs):
        ShapeInferencePass()(model)
    chosen, notes = _choose(model, dtype, set(keep))
    if not any(node.op_type in _PRODUCTS or _is_embedding(node) for node in chosen):
        reasons = "; ".join(notes) or "it has no float32 layers"
        raise QuantizationError(f"nothing in the model can be converted to {_TYPES[dtype]}: {reasons}")
    counts = Counter(node.op_type for node in model.graph if node in chosen)
    writer(model, dtype, chosen, _MOVING).write()
    return Halved(dict(counts), notes)


def _check(dtype: ir.DataType) -> None:
    if dtype not in _TYPES:
        raise InvalidArgument(f"{dtype} is not a half precision; there are FLOAT16 and BFLOAT16")


def _choose(model: ir.Model, dtype: ir.DataType, keep: set[ir.Node]) -> tuple[set[ir.Node], tuple[str, ...]]:
    """Return the nodes to convert, and notes on the layers that must stay."""
    opset = model.graph.opset_imports.get("", 0)
    # A value that a body returns as it is has no user whose input could be replaced.
    fixed = {value for graph in model.graph.subgraphs() for value in graph.outputs}
    names = {layer.node: layer.name for layer in layers.find(model)}
    half: set[ir.Value] = set()
    chosen: set[ir.Node] = set()
    lacking: dict[str, int] = {}
    notes: list[str] = []
    for node in model.graph:
        floats = [value for value in node.inputs if value is not None and half_graph.is_float32(value)]
        if node in keep or not floats or not _is_known(node) or fixed.intersection(node.outputs):
            continue
        if not (node.op_type in _PRODUCTS or _is_embedding(node) or _follows(floats, half)):
            continue
        if dtype is ir.DataType.BFLOAT16 and opset < _SUPPORTED[node.op_type]:
            if node.op_type in _PRODUCTS:
                lacking[node.op_type] = lacking.get(node.op_type, 0) + 1
            continue
        lost = [value for value in floats if constant(value) and not _survives(tensor(value), dtype)]
        if lost:
            if node in names:
                notes.append(f"layer '{names[node]}' stays in float32: it holds numbers beyond {_TYPES[dtype]}")
            continue
        chosen.add(node)
        half.update(node.outputs)
    for operator, count in lacking.items():
        since = _SUPPORTED[operator]
        remedy = f"; export it with opset {since}" if since < _NEVER else ""
        notes.append(f"{count} {operator} stay in float32: there is no bfloat16 kernel in opset {opset}{remedy}")
    return chosen, tuple(notes)


def _is_known(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in _SUPPORTED


def _is_embedding(node: ir.Node) -> bool:
    table = node.inputs[0]
    return node.op_type == "Gather" and table is not None and constant(table) and len(layers.shape(table)) > 1


def _follows(floats: Collection[ir.Value], half: Collection[ir.Value]) -> bool:
    """Return whether all activations among a node's inputs are in half precision, and there is one."""
    moving = [value for value in floats if not constant(value)]
    return bool(moving) and all(value in half for value in moving)


def _survives(held: ir.TensorProtocol, dtype: ir.DataType) -> bool:
    """Return whether no finite number becomes infinite in half precision, and no single one becomes zero."""
    if held.size == 0:
        return True
    try:
        array = held.numpy()
        largest = max(-float(array.min()), float(array.max()))
        if not largest <= _LARGEST[dtype]:  # infinity may well be meant, such as in masks
            largest = float(np.abs(array[np.isfinite(array)]).max(initial=0))
        zero = array.size == 1 and 0 < largest <= _LARGEST[dtype] and not np.any(array.astype(dtype.numpy()))
        return largest <= _LARGEST[dtype] and not zero
    finally:
        del array
        half_graph.release(held)
