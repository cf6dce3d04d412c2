"""Dimensions of an ONNX file, found by running it: the sizes that it accepts, and the shapes of its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ingot.errors import ExportError, InternalError, InvalidArgument, RejectedInputs
from ingot.export.program import Runner
from ingot.export.proof import indices, sizes
from ingot.export.proof.examples import Examples, Limit
from ingot.export.proof.probe import output_specs
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.ort import ort_session
from ingot.tensors import Array, Shape, Signature, TensorSpec, symbols

# Operators whose output contains the values of their first input.
_PASSING = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Transpose", "Slice")


class File:
    """A runner of an unchanged file, which reports the engine's errors as errors of the export.

    Args:
        engine: the engine with the file.
        generated: whether the sizes of the inputs are generated, not declared by the user.
    """

    def __init__(self, engine: Engine, generated: bool):
        self._engine = engine
        self._hint = _hint(engine.signature.inputs) if generated else ""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch.

        Raises:
            RejectedInputs: the file does not accept these inputs.
        """
        try:
            return self._engine.run(inputs)
        except (InvalidArgument, InternalError) as error:
            reason = ort_session.reason_of(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            message = f"the file does not run on {shapes}: {reason}{self._hint}"
            raise RejectedInputs(message, reason) from None  # the engine's message is long


def _hint(inputs: Sequence[TensorSpec]) -> str:
    spec = next((spec for spec in inputs if symbols([spec])), None)
    if spec is None:
        return ""
    return (
        f"; the sizes and values were generated: declare those that it accepts, such as --input '{spec}' with a size, "
        "a range (rows=1..512) or multiples (height=32..:32) in place of a name, one name for dimensions that must be "
        "equal, and a range of values (=1..100) after the dimensions; or pass real inputs with --example"
    )


def index_limits(model: ir.Model) -> dict[str, Limit]:
    """Return the number of table rows or classes that each integer input selects from, where the graph shows it."""
    limits: dict[str, Limit] = {}
    for value in model.graph.inputs:
        chosen = list(_chosen(value)) if value.dtype in (ir.DataType.INT32, ir.DataType.INT64) else []
        if chosen and min(chosen) > 0:
            limits[value.name or ""] = Limit(min(chosen))
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
        elif node.op_type == "Equal" and (other := node.inputs[1 - place]) is not None:  # one-hot by comparison
            classes = ir.convenience.get_const_tensor(other)
            if classes is not None and classes.size > 1:
                yield int(classes.numpy().max()) + 1
        elif node.op_type == "OneHot" and place == 0 and (other := node.inputs[1]) is not None:
            depth = ir.convenience.get_const_tensor(other)
            if depth is not None:
                yield int(depth.numpy().max())


def fitted(file: Runner, examples: Examples) -> tuple[Examples, tuple[str, ...]]:
    """Return generated examples that a file runs on, and notes on its sizes.

    Raises:
        ExportError: it runs on none of those tried.
    """
    notes: list[str] = []
    try:
        file.run(examples.make(examples.default_sizes))
    except ExportError:
        indices.check_ranges(file, examples)
        found = sizes.stepped(file, examples)
        if found is None:
            raise
        notes = sizes.changes(examples, found)
        examples = found
    indices.check_ranges(file, examples)
    examples, more = sizes.narrowed(file, examples)
    return examples, (*notes, *more)


def with_outputs(file: Runner, signature: Signature, examples: Examples) -> Signature:
    """Return a signature whose outputs use the inputs' names for dimensions that always have the same size.

    Files name the dimensions of their outputs differently, wrongly, or not at all. The cases are those of the proof of
    parity, in which every dimension has several sizes.
    """
    seen = {spec.name: spec.shape for spec in output_specs(file, examples)}
    outputs = tuple(
        replace(spec, shape=_shape(spec.shape, seen[spec.name], signature.symbols)) for spec in signature.outputs
    )
    everywhere = all(spec.shape.count(signature.batch or "") == 1 for spec in outputs)
    return replace(signature, outputs=outputs, batch=signature.batch if everywhere else None)


def _shape(declared: Shape, seen: Shape, names: Sequence[str]) -> Shape:
    """Return the observed shape, but keep the file's names for dimensions of this output alone."""
    if len(declared) != len(seen):
        return seen
    return tuple(
        dim if isinstance(dim, str) and dim not in names and found not in names else found
        for dim, found in zip(declared, seen, strict=True)
    )
