"""Lowering to a PyTorch program: an ``ExportedProgram`` as a file, which PyTorch's operators run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.lower.packed import Packed, header, put, release
from ingot.export.program import Program, quiet
from ingot.export.torch_internals import OpOverload, python_body, with_copied_graph
from ingot.model_store import BlobFolder
from ingot.runtime.engines.pytorch.torch_program import HEADER

_BUILT_IN = ("aten", "prims", "prim", "higher_order", "quantized")


def lower(program: Program, path: Path, *, decompose: bool = False) -> Path:
    """Save a captured program.

    Args:
        program: the program.
        path: the file; its name ends in ``.pt2``.
        decompose: decompose operators to core ATen, some 200 operators instead of over 2,000.

    Raises:
        ExportError: PyTorch cannot save it, or a user-defined operator fixes a dimension.
    """
    program = inlined(program)
    with foreign.reported_as(ExportError, _unsaved), quiet():
        saved = program.exported.run_decompositions() if decompose else program.exported
        torch.export.save(_stripped(saved), path, extra_files={HEADER: header(program, foreign_operators(program))})
    return path


def _unsaved(error: Exception) -> str:
    return f"PyTorch cannot save the model as a program: {foreign.first_line(error)[:500]}"


def pack(program: Program, blobs: BlobFolder, *, decompose: bool = False) -> Packed:
    """Put a program into ``blobs``; see :func:`lower`."""
    program = inlined(program)
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        path = lower(program, Path(folder) / "model.pt2", decompose=decompose)
        graph = put(path, blobs)
    requires = {"engine": "torch", "torch": release()}
    custom = ", ".join(foreign_operators(program))
    if not custom:
        return Packed(graph, (), "pt2", requires)
    note = f"it runs only in a process that has imported the code that defines {custom}"
    return Packed(graph, (), "pt2", requires | {"operators": custom}, (note,))


def inlined(program: Program) -> Program:
    """Replace operators defined in Python by their bodies, so that the program runs without their source.

    Operators whose bodies cannot be traced stay.

    Raises:
        ExportError: a body fixes a dimension that is declared dynamic.
    """
    found = [(operator, python_body(name)) for name, operator in foreign_operators(program).items()]
    bodies = {operator: body for operator, body in found if body is not None}
    if not bodies:
        return program
    with quiet():
        expanded = foreign.attempt(lambda: program.exported.run_decompositions(bodies))
    if expanded is None:
        return program
    inputs = [node for node in expanded.graph.nodes if node.name in expanded.graph_signature.user_inputs]
    for spec, node in zip(program.signature.inputs, inputs, strict=True):
        for dim, size in zip(spec.shape, node.meta["val"].shape, strict=True):
            if isinstance(dim, str) and (isinstance(size, int) or size.node.expr.is_number):
                raise ExportError(
                    f"dimension '{dim}' of input '{spec.name}' becomes fixed at {int(size)} in the body of "
                    f"{' and '.join(map(str, bodies))}; declare it as {int(size)}, or export to ONNX"
                )
    return replace(program, exported=expanded)


def _stripped(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a copy without the author's private data: lines and paths of their code, and their example inputs."""
    copied = with_copied_graph(exported)
    for node in _nodes(copied):
        node.meta.pop("stack_trace", None)
    copied.example_inputs = None
    return copied


def foreign_operators(program: Program) -> dict[str, OpOverload]:
    """Return the operators of a program that are not part of PyTorch, by name, such as ``acme::norm``."""
    targets = (node.target for node in _nodes(program.exported))
    found = [item for item in targets if isinstance(item, OpOverload) and item.namespace not in _BUILT_IN]
    return {str(item.name()): item for item in sorted(found, key=str)}  # type: ignore[no-untyped-call]


def _nodes(exported: torch.export.ExportedProgram) -> Iterator[fx.Node]:
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
