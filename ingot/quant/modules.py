"""Quantize PyTorch modules: they are exported first, with input specs derived from the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ingot.errors import InvalidArgument
from ingot.model_store import Archive
from ingot.tensors import DType, arrays


class Module(Protocol):
    """The interface of a PyTorch module, without importing PyTorch."""

    @property
    def forward(self) -> Callable[..., Any]: ...

    def state_dict(self, *args: Any, **options: Any) -> Any: ...


def exported(model: Module, data: Any) -> Archive:
    """Return a module's archive.

    Args:
        model: the module.
        data: arrays by the names of ``forward``'s parameters, each with all rows along its first axis, or such an
            ``.npz``.

    Raises:
        InvalidArgument: it is not a module, or the data lacks arrays of its inputs.
        ExportError: the module cannot be exported.
    """
    from ingot.export import export_model

    if not hasattr(model, "forward") or not hasattr(model, "state_dict"):
        raise InvalidArgument(f"{model!r} is neither an archive, a path nor a module, so it cannot be quantized")
    held = arrays.load_npz(data) if isinstance(data, str | Path) and str(data).endswith(".npz") else data
    parameters = list(inspect.signature(model.forward).parameters)
    if not isinstance(held, Mapping) or not any(name in held for name in parameters):
        raise InvalidArgument(
            f"to quantize a module, pass data as arrays by the names of its inputs ({', '.join(parameters)}) or such "
            "an .npz; or export it first with ingot.export_model"
        )
    inputs = []
    for name in parameters:
        if name in held:
            array = np.asarray(held[name])
            dims = ",".join(["batch", *map(str, array.shape[1:])])
            inputs.append(f"{name}:{DType.of(array).torch_name}[{dims}]")
    name = type(model).__name__.lower()
    return export_model(model, inputs=inputs, name=name)  # type: ignore[arg-type]  # a module, by its methods
