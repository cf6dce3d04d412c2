"""Capture by ``torch.export`` with named dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export.program import Eager, Program, name_outputs, quiet
from ingot.tensors import Array, DType, Range, Shape, Signature, TensorSpec, symbols


def capture(
    eager: Eager,
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    example: Mapping[str, Array],
    output_names: Sequence[str] = (),
) -> Program:
    """Capture a module as an ExportedProgram.

    Args:
        eager: the module and how its inputs are bound.
        inputs: names the dynamic dimensions.
        ranges: their bounds.
        example: inputs to trace with; named dimensions should be 2 or more and distinct.
        output_names: overrides the outputs' names.

    Raises:
        ExportError: ``torch.export`` fails, fixes a dimension that is declared dynamic, or the model changes its state.
    """
    args, kwargs = eager.bind(example)
    dims = {symbol: _dim(symbol, ranges.get(symbol, Range())) for symbol in symbols(inputs)}
    shapes = {
        spec.name: {axis: dims[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in inputs
    }
    dynamic: Any = shapes if kwargs else tuple(shapes.values())
    with torch.no_grad():
        before = _contents(eager.module, args, kwargs)
        outputs = name_outputs(eager.module(*args, **kwargs), output_names)
    _refuse_mutation(before, _contents(eager.module, args, kwargs))
    module = _as_module(eager.module, args, kwargs)
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
    except Exception as error:  # torch.export raises many kinds
        raise ExportError(f"torch.export cannot capture the model: {_explain(error)}") from error
    return Program(
        exported, _signature(exported, inputs, ranges, list(outputs)), (f"torch.export {torch.__version__}",)
    )


def _dim(symbol: str, bounds: Range) -> torch.export.Dim:
    return torch.export.Dim(symbol, min=bounds.low if bounds.low > 1 else None, max=bounds.high)


def _as_module(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module that torch.export can trace; a TorchScript one is first converted to an FX graph."""
    if not isinstance(module, torch.jit.ScriptModule):
        return module
    from torch._export.converter import TS2EPConverter

    try:
        with quiet():
            converted = TS2EPConverter(module, args, kwargs).convert()
            return converted.module()
    except Exception as error:
        raise ExportError(f"the TorchScript model cannot be converted: {_explain(error)}") from error


def _contents(
    module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return copies of the buffers and inputs, which a run of the module must leave as they are."""
    inputs = {**{f"input {index}": value for index, value in enumerate(args)}, **kwargs}
    return {name: value.clone() for name, value in (*module.named_buffers(), *inputs.items())}


def _refuse_mutation(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    changed = [name for name, value in before.items() if name not in after or not _same(value, after[name])]
    if changed:
        raise ExportError(
            f"the model changes {', '.join(sorted(changed))} while it runs, which a served graph would silently drop; "
            "return the new value as an output and take the old one as an input"
        )


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=left.is_floating_point())


def _signature(
    exported: torch.export.ExportedProgram, inputs: Sequence[TensorSpec], ranges: Mapping[str, Range], names: list[str]
) -> Signature:
    nodes = {node.name: node for node in exported.graph.nodes}
    renamed: dict[sympy.Symbol, sympy.Symbol] = {}
    for spec, node_name in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        value = nodes[str(node_name)].meta["val"]
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, str):
                continue
            size = value.shape[axis]
            if isinstance(size, int):
                raise ExportError(
                    f"dimension '{dim}' of input '{spec.name}' became fixed at {size} while the model was captured; "
                    f"declare it as {size}, or remove the code that depends on its value"
                )
            renamed[size.node.expr] = sympy.Symbol(dim, integer=True, positive=True)
    outputs = []
    returned = [item for item in exported.graph_signature.user_outputs if item is not None]
    constants = [item for item in returned if not isinstance(item, str)]
    if constants:
        raise ExportError(
            f"the model returns {constants[0]!r} beside tensors, which a graph cannot; return tensors only"
        )
    for name, node_name in zip(names, returned, strict=True):
        value = nodes[str(node_name)].meta["val"]
        shape: Shape = tuple(
            size if isinstance(size, int) else str(size.node.expr.subs(renamed)) for size in value.shape
        )
        outputs.append(TensorSpec(name, DType.parse(str(value.dtype).removeprefix("torch.")), shape))
    return Signature(tuple(inputs), tuple(outputs), ranges=dict(ranges))


def _explain(error: Exception) -> str:
    """Return torch's message in one paragraph, its own hints in our syntax."""
    text = str(error)
    if fixes := re.findall(r"^\s*(\w+) = Dim\('\w+'(.*)\)", text, re.MULTILINE):
        wanted = []
        for name, bounds in fixes:
            low, high = re.search(r"min=(\d+)", bounds), re.search(r"max=(\d+)", bounds)
            wanted.append(f"{name}={low[1] if low else ''}..{high[1] if high else ''}")
        return f"the model's code limits its dimensions; declare them as {', '.join(wanted)}"
    if fixes := re.findall(r"^\s*(\w+) = (\d+)\s*$", text, re.MULTILINE):
        wanted = [f"'{name}' as {size}" for name, size in fixes]
        return (
            "the model's code, or a layer in it, fixes a dimension that is declared dynamic; "
            f"declare {', '.join(wanted)}, or see docs/export.md on recurrent layers"
        )
    paragraph = " ".join(text.split("\n\n", 1)[0].split()) or type(error).__name__
    if "data-dependent" in paragraph:
        paragraph = (
            "its code decides by the values of a tensor (such as `if x.sum() > 0`), which a graph cannot; "
            f"use torch.where or torch.cond. {paragraph}"
        )
    place = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    user = [f"{file}:{line} in {function}" for file, line, function in place if "site-packages" not in file]
    return paragraph[:500] + (f" (at {user[-1]})" if user else "")
