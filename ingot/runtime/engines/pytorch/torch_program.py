"""PyTorch programs: a captured graph that PyTorch's own operators run one after the other."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export.passes import move_to_device_pass

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import TorchHeader
from ingot.runtime.engines.pytorch.torch_engine import TorchEngine, pick_device
from ingot.runtime.gpu.graphs import GraphOptions

HEADER = "ingot.json"
"""The extra file with the program's :class:`~ingot.model_store.format.partition.TorchHeader`."""


class TorchProgramEngine(TorchEngine):
    """An ``ExportedProgram`` saved by :mod:`ingot.export.lower.program`. Loading it can run code."""

    platform = "torch_export"

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        graphs: GraphOptions | None = None,
        precision: str = "f32",
    ):
        chosen = pick_device(device)
        header, program = read_program(path)
        if chosen != "cpu":
            program = move_to_device_pass(program, chosen)
        super().__init__(header.signature, chosen, threads, precision)
        self._graph: Any = flat(program)
        self._keep_to_itself(tensors_of(self._graph))
        self._loaded(graphs)

    def call(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self._graph.forward(*values)
        return outputs

    def _release(self) -> None:
        del self._graph


def read_program(path: Path) -> tuple[TorchHeader, torch.export.ExportedProgram]:
    """Return the header and the program of a file.

    Raises:
        InvalidArgument: it is not a program that Ingot exported.
        Unsupported: it needs an operator that no imported package defines.
    """
    header = read_header(path)
    _check_operators(header)

    def unread(error: Exception) -> str:
        return f"{path.name} cannot be loaded: {foreign.first_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), path.open("rb") as stream:
        return header, torch.export.load(stream)  # given a path, PyTorch insists on a suffix


def flat(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return a program as a module that accepts and returns tensors by position."""
    # Engines check their inputs themselves: without PyTorch's checks and its handling of nested arguments, a call takes
    # 0.1 ms less.
    module: fx.GraphModule = program.module(check_guards=False)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module


def tensors_of(graph: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all tensors of a graph: weights, and constants, which can be plain attributes."""
    yield from graph.parameters()
    yield from graph.buffers()
    for module in graph.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def read_header(path: Path) -> TorchHeader:
    """Return a file's header without loading the program."""
    if not path.is_file():
        raise InvalidArgument(f"there is no model file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/extra/{HEADER}"))
            raw = archive.read(name)
    except zipfile.BadZipFile as error:
        raise InvalidArgument(f"{path.name} is not a PyTorch program, or is damaged: {error}") from error
    except StopIteration:
        raise InvalidArgument(
            f"{path.name} lacks a description of its inputs: it was not made by ingot export"
        ) from None
    return manifest.decode(TorchHeader, raw, f"the header of {path.name}")


def _check_operators(header: TorchHeader) -> None:
    for operator in header.operators:
        namespace, _, name = operator.partition("::")
        if not hasattr(getattr(torch.ops, namespace), name.partition(".")[0]):
            raise Unsupported(
                f"the model needs the operator {operator}, which no imported package "
                "defines; import the package that does, and serve the model from that process by ingot.serve"
            )
