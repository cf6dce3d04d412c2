"""The common part of the PyTorch engines: array conversion, threads, devices, and the meaning of failures."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from ingot import tensors
from ingot.errors import IngotError, InternalError, InvalidArgument, Unsupported
from ingot.runtime import devices, plugins
from ingot.tensors import Array, DType, Signature, TensorSpec

# Errors of operators on unsuitable values, such as a singular matrix.
_CALLERS = (IndexError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
# The same, for errors of generic types.
_REJECTIONS = ("index out of", "is invalid for input of size", "ZeroDivisionError")


class TorchEngine(ABC):
    """A model that accepts and returns tensors by position, in the order of its signature."""

    platform: ClassVar[str]

    def __init__(self, signature: Signature, device: str, threads: int | None):
        self._signature = signature
        self._device = device
        self._threads = threads
        self._weights: frozenset[int] = frozenset()

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def device(self) -> str:
        return self._device

    @property
    def settings(self) -> Mapping[str, str]:
        return {"threads": str(self._threads or torch.get_num_threads())}

    @abstractmethod
    def call(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the model on tensors that are on its device."""

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Native code trusts the shapes that it was compiled for: with others it would read foreign memory.
        tensors.check_inputs(self._signature, inputs)
        values = [to_torch(spec, inputs[spec.name]).to(self._device) for spec in self._signature.inputs]
        try:
            with torch.no_grad(), _threads(self._threads):
                outputs = self.call(values)
        except Exception as error:  # operators, including the user's own, raise many types
            raise _run_error(error) from error
        arrays = _own_arrays(outputs, {*self._weights, *map(_place, values)})
        return {spec.name: array for spec, array in zip(self._signature.outputs, arrays, strict=True)}

    def terminate(self) -> None:  # noqa: B027 - no engine of PyTorch has anything to do
        """Have no effect: PyTorch cannot interrupt an operator, and none of its programs checks between two."""

    def _keep_to_itself(self, weights: Iterable[torch.Tensor]) -> None:
        """Remember weights that the model may return, so that callers receive copies."""
        self._weights = frozenset(map(_place, weights))


def _own_arrays(outputs: Iterable[torch.Tensor], taken: set[int]) -> list[Array]:
    """Return outputs as arrays that share no memory, so that writing into one changes nothing else.

    Outputs are copied only if their memory is taken, belongs to another output, or does not come from PyTorch, as the
    weights of a compiled model.
    """
    arrays = []
    for output in outputs:
        tensor = output.detach().cpu().contiguous()
        if _place(tensor) in taken or not tensor.untyped_storage().resizable():
            tensor = tensor.clone()
        taken.add(_place(tensor))
        arrays.append(from_torch(tensor))
    return arrays


def _place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which all its views share."""
    return tensor.untyped_storage().data_ptr()


def to_torch(spec: TensorSpec, array: Array) -> torch.Tensor:
    """Return an array as a tensor, which shares its memory if that is writable and aligned."""
    if spec.dtype is DType.BYTES:
        raise InvalidArgument(f"input '{spec.name}' is text, which PyTorch tensors cannot hold")
    array = np.require(array, requirements=("C", "A", "W"))
    if spec.dtype is DType.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DType.BF16.numpy)
    return tensor.numpy()


def pick_device(device: str, built_for: str | None = None) -> str:
    """Return the device to load to.

    Args:
        device: the request: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``auto:1`` for the second GPU if it can be used,
            or one that a plug-in adds to PyTorch.
        built_for: the only device that the model can run on, or None.

    Raises:
        InvalidArgument: there is no such device.
        Unsupported: it is missing, or the model was built for another.
    """
    kind = devices.kind_of(device)
    if kind not in ("auto", "cpu", "cuda") and plugins.find("ingot.devices", kind) is None:
        raise InvalidArgument(f"unknown device '{device}'; use auto, cpu or cuda, or install a plug-in for it")
    if built_for is not None and kind not in ("auto", built_for):
        raise Unsupported(f"the model was compiled for '{built_for}' and cannot run on '{device}'; export it for that")
    usable = torch.cuda.is_available()
    found = device.replace("auto", "cuda") if usable else "cpu" if kind == "auto" else device
    chosen = built_for or found
    if chosen.startswith("cuda") and not usable:
        raise Unsupported(f"device '{chosen}' is not available: PyTorch finds no NVIDIA driver or GPU, or lacks CUDA")
    return chosen


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of threads, which belongs to the calling thread, and restore it afterwards."""
    before = torch.get_num_threads()
    if count in (None, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_error(error: Exception) -> IngotError:
    reason = str(error).partition("\n")[0]  # the rest is a trace of PyTorch's code
    if isinstance(error, _CALLERS) or any(text in reason for text in _REJECTIONS):
        return InvalidArgument(f"the model rejects this input: {reason}")
    return InternalError(f"the engine failed on this input: {type(error).__name__}: {reason}")
