"""Triton's reshapes as steps of the graph, so that clients send and receive the shapes that they know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument
from ingot.importing.record import Declared

Sizes = tuple[int | None, ...]


def reshape_graph(path: Path, called: str, declared: Sequence[Declared], target: Path) -> Path:
    """Return an ONNX file whose inputs and outputs have the declared shapes; ``path`` if none is reshaped.

    Args:
        path: the file.
        called: its name in messages.
        declared: inputs and outputs, some with ``inner`` sizes.
        target: the file to write, with its weights next to it.

    Raises:
        InvalidArgument: the file has no such tensor, or the sizes do not fit each other.
    """
    pending = {item.name: item for item in declared if item.inner is not None}
    if not pending:
        return path
    import onnx_ir as ir

    from ingot.model_store.format import onnx_graph

    model = onnx_graph.load(path, called)
    graph = model.graph
    for index, value in enumerate(graph.inputs):
        if value.name in pending:
            item = pending.pop(value.name)
            graph.inputs[index] = _before(ir, graph, value, item)
    for index, value in enumerate(graph.outputs):
        if value.name in pending:
            item = pending.pop(value.name)
            graph.outputs[index] = _after(ir, graph, value, item)
    if pending:
        raise InvalidArgument(f"{called} has no input or output '{next(iter(pending))}', which is to be reshaped")
    ir.save(model, target, external_data=f"{target.name}.data")
    return target


def _before(ir: Any, graph: Any, value: Any, item: Declared) -> Any:
    """Insert a step from the declared shape of an input to the model's own."""
    shown = ir.val(value.name, shape=_shape(ir, value, item), type=value.type)
    node = ir.node("Reshape", [shown, _target(ir, graph, item, item.inner)])
    ir.convenience.replace_all_uses_with(value, node.outputs[0])
    value.name = node.outputs[0].name = f"{item.name}_reshaped"
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    graph.insert_before(graph[0], node)
    return shown


def _after(ir: Any, graph: Any, value: Any, item: Declared) -> Any:
    """Append a step from the model's own shape of an output to the declared one."""
    node = ir.node("Reshape", [value, _target(ir, graph, item, item.sizes)])
    shown = node.outputs[0]
    shown.shape, shown.type = _shape(ir, value, item), value.type
    value.name, shown.name = f"{item.name}_reshaped", item.name
    graph.append(node)
    return shown


def _shape(ir: Any, value: Any, item: Declared) -> Any:
    first = [value.shape[0] if value.shape else "batch"] if item.batched else []
    rest = [f"{item.name}_{axis}" if size is None else size for axis, size in enumerate(item.sizes, len(first))]
    return ir.Shape([*first, *rest])


def _target(ir: Any, graph: Any, item: Declared, sizes: Sizes | None) -> Any:
    """Return the shape input of a Reshape to ``sizes``; a leading 0 keeps the batch."""
    outer, inner = item.sizes, item.inner or ()
    known = [math.prod(size for size in side if size is not None) for side in (outer, inner)]
    free = [side.count(None) for side in (outer, inner)]
    if max(free) > 1 or free[0] != free[1] or (not free[0] and known[0] != known[1]):
        raise InvalidArgument(
            f"the reshape of '{item.name}' from {_shown(outer)} to {_shown(inner)} is not supported: both need the "
            "same number of elements and the same number of dynamic dimensions, at most one"
        )
    wanted = [0] * item.batched + [-1 if size is None else size for size in sizes or ()]
    constant = ir.Value(name=f"{item.name}_shape", const_value=ir.tensor(np.array(wanted, np.int64)))
    constant.const_value.name = constant.name
    graph.register_initializer(constant)
    return constant


def _shown(sizes: Sizes) -> str:
    return f"[{','.join('-1' if size is None else str(size) for size in sizes)}]"
