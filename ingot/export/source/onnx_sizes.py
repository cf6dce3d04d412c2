"""What running an ONNX file tells of its dimensions: sizes that it takes, and which of its outputs have them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ingot.errors import ExportError, InternalError, InvalidArgument
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.probe import output_specs
from ingot.runtime.engine import Engine
from ingot.runtime.engines import ort, ort_session
from ingot.tensors import Array, Range, Shape, Signature, TensorSpec, symbols

# Operators that hand on their first input's values.
_PASSING = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Transpose", "Slice")
_STEPS = (2, 4, 8, 16, 32, 64)


class File:
    """Runs a file as it is. What the engine says of inputs that it cannot run is an error of the export.

    Args:
        engine: runs the file.
        made_up: whether nobody said which sizes it takes.
    """

    def __init__(self, engine: Engine, made_up: bool):
        self._engine = engine
        self._hint = _hint(engine.signature.inputs) if made_up else ""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch.

        Raises:
            ExportError: the file does not take these inputs.
        """
        log = logging.getLogger(ort.__name__)
        quiet, log.disabled = log.disabled, True
        try:
            return self._engine.run(inputs)
        except (InvalidArgument, InternalError) as error:
            reason = ort_session.reason_of(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            raise ExportError(f"the file does not run on {shapes}: {reason}{self._hint}") from error
        finally:
            log.disabled = quiet


def _hint(inputs: Sequence[TensorSpec]) -> str:
    spec = next((spec for spec in inputs if symbols([spec])), None)
    if spec is None:
        return ""
    return (
        f"; the sizes were made up: say which it takes, such as --input '{spec}' with a size, a range (rows=1..512) or "
        "multiples (height=32..:32) in place of a name, and one name for dimensions that must be equal; or give real "
        "inputs by --example"
    )


def index_limits(model: ir.Model) -> dict[str, int]:
    """Return of how many rows of a table, or classes, each integer input chooses, where the graph tells that."""
    limits: dict[str, int] = {}
    for value in model.graph.inputs:
        chosen = list(_chosen(value)) if value.dtype in (ir.DataType.INT32, ir.DataType.INT64) else []
        if chosen and min(chosen) > 0:
            limits[value.name or ""] = min(chosen)
    return limits


def _chosen(value: ir.Value) -> Iterator[int]:
    for node, place in value.uses():
        if node.op_type in _PASSING and place == 0:
            yield from _chosen(node.outputs[0])
        elif node.op_type == "Gather" and place == 1 and (table := node.inputs[0]) is not None:
            axis = node.attributes.get_int("axis", 0)
            rows = table.shape[axis] if table.shape is not None and not table.is_graph_input() else None
            if isinstance(rows, int):
                yield rows
        elif node.op_type == "Equal" and (other := node.inputs[1 - place]) is not None:  # one-hot, written out
            classes = ir.convenience.get_const_tensor(other)
            if classes is not None and classes.size > 1:
                yield int(classes.numpy().max()) + 1
        elif node.op_type == "OneHot" and place == 0 and (other := node.inputs[1]) is not None:
            depth = ir.convenience.get_const_tensor(other)
            if depth is not None:
                yield int(depth.numpy().max())


def runnable(
    file: Runner, make: Callable[[Mapping[str, Range]], Examples], ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Return ranges that a file was seen to run in: those given, and steps of dimensions that nobody bounded.

    Args:
        file: runs the file.
        make: makes examples of sizes in some ranges.
        ranges: those given.

    Raises:
        ExportError: no step helps; the error is that of the first try.
    """
    first = _fails(file, make(ranges))
    if first is None:
        return dict(ranges)
    free = [symbol for symbol in make(ranges).default_sizes if symbol not in ranges]
    for step in _STEPS if free else ():
        found = {**ranges, **{symbol: Range(step, None, step) for symbol in free}}
        if _fails(file, make(found)) is None:
            break
    else:
        raise first
    for symbol in free:
        for step in (1, *_STEPS):
            lesser = {**found, symbol: Range(step, None, step)}
            if step < found[symbol].step and _fails(file, make(lesser)) is None:
                found = lesser
                break
    return {symbol: bounds for symbol, bounds in found.items() if symbol in ranges or bounds.step > 1}


def _fails(file: Runner, examples: Examples) -> ExportError | None:
    try:
        file.run(examples.make(examples.default_sizes))
    except ExportError as error:
        return error
    return None


def with_outputs(file: Runner, signature: Signature, examples: Examples) -> Signature:
    """Return a signature whose outputs have the inputs' names for the dimensions that were seen to be theirs.

    Files name the dimensions of their outputs otherwise, or wrongly, or not at all. The sizes are those of the proof
    of parity, in which every dimension has several.
    """
    seen = {spec.name: spec.shape for spec in output_specs(file, examples)}
    outputs = tuple(
        replace(spec, shape=_shape(spec.shape, seen[spec.name], signature.symbols)) for spec in signature.outputs
    )
    everywhere = all(spec.shape.count(signature.batch or "") == 1 for spec in outputs)
    return replace(signature, outputs=outputs, batch=signature.batch if everywhere else None)


def _shape(declared: Shape, seen: Shape, names: Sequence[str]) -> Shape:
    """Return what was seen, but a name that the file has for a dimension of this output alone."""
    if len(declared) != len(seen):
        return seen
    return tuple(
        dim if isinstance(dim, str) and dim not in names and found not in names else found
        for dim, found in zip(declared, seen, strict=True)
    )
