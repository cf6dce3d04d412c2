"""AOTInductor packages: a model compiled to native code ahead of time."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import TorchHeader
from ingot.runtime.engines.pytorch.torch_engine import TorchEngine, pick_device
from ingot.runtime.gpu.graphs import GraphOptions

HEADER = "ingot"
"""The key in the package's metadata of its :class:`~ingot.model_store.format.partition.TorchHeader`."""
# PyTorch's name of an instruction set in compiled packages -> in its description of the machine.
_CAPABILITIES = {"avx512": "avx512_f"}
# The public aoti_load_package insists on a suffix, and compiles test programs to detect instruction sets:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/inductor/aoti_package/pybind.cpp
_LOADER: Any = torch._C._aoti.AOTIModelPackageLoader


class AotiEngine(TorchEngine):
    """A package compiled by :mod:`ingot.export.lower.aoti`. Loading it runs its code."""

    platform = "torch_aoti"

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        graphs: GraphOptions | None = None,
        precision: str = "f32",
    ):
        metadata = read_metadata(path)
        if HEADER not in metadata:
            raise InvalidArgument(f"{path.name} lacks a description of its inputs: it was not made by ingot export")
        header = manifest.decode(TorchHeader, metadata[HEADER].encode(), f"the header of {path.name}")
        _check_machine(header, metadata)
        super().__init__(header.signature, pick_device(device, metadata.get("AOTI_DEVICE_KEY")), threads, precision)
        kind, _, index = self._device.partition(":")
        try:
            # On a GPU without the events by which its calls in several threads wait for each other: a pipeline launches
            # one at a time, and a graph cannot contain them.
            self._model = _LOADER(str(path), "model", kind == "cuda", 1, int(index or -1))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise InvalidArgument(f"the package {path.name} cannot be loaded: {reason}") from error
        self._loaded(graphs)

    def call(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self._model.boxed_run(values)
        return outputs

    def _release(self) -> None:
        del self._model


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return a package's metadata without loading its code.

    Raises:
        InvalidArgument: there is no such file, or it is not a package.
    """
    if not path.is_file():
        raise InvalidArgument(f"there is no model file {path}")
    try:
        metadata: Mapping[str, str] = _LOADER.load_metadata_from_package(str(path), "model")
    except RuntimeError as error:
        raise InvalidArgument(f"{path.name} is not an AOTInductor package, or is damaged") from error
    return metadata


def _check_machine(header: TorchHeader, metadata: Mapping[str, str]) -> None:
    """Refuse an incompatible package before its code is loaded, which would end the process.

    Raises:
        Unsupported: it is for another PyTorch or another processor.
    """
    here = torch.__version__.partition("+")[0]
    if header.torch != here:
        raise Unsupported(
            f"the package was compiled with PyTorch {header.torch} and runs only with that; this is {here}: "
            "install that version, or export the model again"
        )
    machine, wanted = platform.machine(), metadata.get("AOTI_MACHINE")
    if machine != wanted:
        raise Unsupported(f"the package was compiled for processors of type {wanted}; this one is {machine}")
    capabilities = torch.cpu.get_capabilities()
    needed = metadata.get("AOTI_CPU_ISA", "").lower().split()
    missing = [name for name in needed if capabilities.get(_CAPABILITIES.get(name, name)) is False]
    if missing:
        raise Unsupported(
            f"the package was compiled for processors with {', '.join(needed)}; this one lacks {', '.join(missing)}: "
            "export the model on a machine like this one"
        )
