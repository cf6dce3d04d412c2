"""Captured programs for quantization: read from an archive, edited as a graph, and captured again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from ingot import foreign
from ingot.errors import InvalidArgument, QuantizationError
from ingot.export.arguments import to_torch
from ingot.export.capture import exported
from ingot.export.program import Program, quiet, user_path
from ingot.model_store import Variant
from ingot.quant.data.sources.items import Batch
from ingot.quant.graph import layers
from ingot.tensors import Range, Signature, symbols

aten = torch.ops.aten

# The position of the weight among the arguments.
_WEIGHTED = {
    aten.linear.default: 1,
    aten.conv1d.default: 1,
    aten.conv2d.default: 1,
    aten.conv3d.default: 1,
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 1,
    aten.conv_transpose3d.input: 1,
    aten.embedding.default: 0,
}
# Sizes to trace with: at least 2, as smaller ones become fixed, and distinct, so that no two dimensions are merged.
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def read(variant: Variant) -> Program:
    """Return the program of a variant of format ``pt2``. Loading it can run its author's code.

    Raises:
        InvalidArgument: the variant is of another format, or damaged.
    """
    if variant.serving.format != "pt2":
        raise InvalidArgument(
            f"'{variant.name}' is of format '{variant.serving.format}', not a PyTorch program: export the model with "
            "--to pt2"
        )

    def unread(error: Exception) -> str:
        return f"'{variant.name}' cannot be loaded: {foreign.first_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), variant.path().open("rb") as stream, quiet():
        loaded = torch.export.load(stream)
    return Program(loaded, variant.signature)


def find(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the calls that have weights, by the path of their module in the user's model."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        weight = node.args[_WEIGHTED[node.target]] if node.target in _WEIGHTED else None
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            path = user_path(str(weight.target))
            base = path.rpartition(".")[0] or path
            names = (base if count == 1 else f"{base}#{count}" for count in itertools.count(1))
            found[next(name for name in names if name not in found)] = node
    return found


def kept(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """Return the layers selected by names or prefixes.

    Raises:
        InvalidArgument: there is no such layer.
    """
    found = find(graph)
    return {found[name] for name in layers.choose(tuple(found), names)}


def tensors(signature: Signature, batch: Batch) -> list[torch.Tensor]:
    """Return a batch as a program's inputs."""
    return [to_torch(batch.inputs[spec.name]) for spec in signature.inputs]


def capture(module: fx.GraphModule, program: Program) -> Program:
    """Capture an edited graph of a program again; its inputs and outputs are those of the program.

    Raises:
        QuantizationError: that fails, or a dimension that was dynamic became fixed.
    """
    signature = program.signature
    names = [spec.name for spec in signature.outputs]
    failure: Exception | None = None

    def again(options: Mapping[str, bool]) -> Program:
        traced = exported.trace(
            exported.positional(module), signature.inputs, signature.ranges, _example(signature), **options
        )
        return exported.program(traced, signature.inputs, signature.ranges, names)

    # A program from a file does not record how it was traced.
    for options in (program.options,) if program.options else ({}, {"oblivious": True}):
        made = foreign.outcome(functools.partial(again, options))
        if not isinstance(made, Exception):
            return replace(program, exported=made.exported, options=options)
        failure = failure or made
    reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
    raise QuantizationError(f"the quantized model cannot be captured again: {reason}") from failure


def _example(signature: Signature) -> tuple[torch.Tensor, ...]:
    """Return inputs to trace with; their values do not matter as long as the model accepts them."""
    sizes = {}
    for symbol, size in zip(symbols(signature.inputs), itertools.cycle(_SIZES), strict=False):
        sizes[symbol] = signature.ranges.get(symbol, Range()).nearest(size)
    return tuple(
        torch.full(
            [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape],
            spec.nearest_to_zero,
            dtype=getattr(torch, spec.dtype.torch_name),
        )
        for spec in signature.inputs
    )
