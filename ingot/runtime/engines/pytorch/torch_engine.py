"""The common part of the PyTorch engines: array conversion, threads, devices, and the meaning of failures."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch

from ingot import tensors
from ingot.errors import EngineLost, IngotError, InternalError, InvalidArgument, TooLarge, Unsupported
from ingot.runtime.engines.pipelined import PipelinedEngine, pipeline_of
from ingot.runtime.engines.pytorch.torch_arrays import from_torch, to_torch
from ingot.runtime.engines.pytorch.torch_lane import Backend, CudaBackend, TorchLane
from ingot.runtime.gpu.graphs import GraphOptions, described, graphs_of
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.runtime.gpu.precision import use_precision
from ingot.runtime.machine import devices, nvml, plugins
from ingot.runtime.machine.memory import NO_MEMORY
from ingot.tensors import Array, Signature

# Errors of operators on unsuitable values, such as a singular matrix.
_CALLERS = (IndexError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
# The same, for errors of generic types.
_REJECTIONS = ("index out of", "is invalid for input of size", "ZeroDivisionError")


class TorchEngine(PipelinedEngine):
    """A model that accepts and returns tensors by position, in the order of its signature.

    Constructors of the formats that run in a pipeline call :meth:`_loaded` last.

    Args:
        signature: the model's signature.
        device: where it is, with an index if that is a GPU.
        threads: CPU threads per call; by default PyTorch's own number.
        precision: of products of 32-bit floats on a GPU: ``f32`` or ``tf32``.

    Raises:
        Unsupported: another model of this process has another precision.
    """

    platform: ClassVar[str]
    _lane: TorchLane | None

    def __init__(self, signature: Signature, device: str, threads: int | None, precision: str):
        if devices.kind_of(device) == "cuda":
            use_torch_precision(precision)
        self._signature = signature
        self._device = device
        self._threads = threads
        self._weights: frozenset[int] = frozenset()
        self._users = [self]
        self._backend: Backend | None = None

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def device(self) -> str:
        return self._device

    @property
    def settings(self) -> Mapping[str, str]:
        threads = {"threads": str(self._threads or torch.get_num_threads())}
        if self._device == "cpu":
            return threads
        pipeline = "off" if self._lane is None else "on"
        return {**threads, "pipeline": pipeline, "cuda_graphs": described(self._graphs)}

    @abstractmethod
    def call(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the model on tensors that are on its device."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Native code trusts the shapes that it was compiled for: with others it would read foreign memory.
        tensors.check_inputs(self._signature, inputs)
        run = self._run_here if self._lane is None else self._lane.run
        try:
            with torch.no_grad(), _threads(self._threads):
                arrays = run(inputs)
        except IngotError:
            raise
        except Exception as error:  # operators, including the user's own, raise many types
            if self.down:
                raise EngineLost(f"the device {self._device} failed: {self.down}") from error
            raise run_error(error) from error
        return {spec.name: array for spec, array in zip(self._signature.outputs, arrays, strict=True)}

    def close(self) -> None:
        super().close()
        if self._backend is not None and not self._users:
            self._backend.close()

    def terminate(self) -> None:
        """Have no effect: PyTorch cannot interrupt an operator, and none of its programs checks between two."""

    def _loaded(self, graphs: GraphOptions | None) -> None:
        """Run in a pipeline if the model is on an NVIDIA GPU; ``graphs`` are captured there."""
        if devices.kind_of(self._device) != "cuda" or (pipeline := pipeline_of(self._device)) is None:
            return
        self._graphs = graphs_of(self._signature, graphs)
        with contextlib.ExitStack() as on_error:
            on_error.callback(pipeline.close)  # or it would keep its share of the device's time
            self._backend = CudaBackend(devices.index_of(self._device))
            self._pipeline = pipeline
            self._enter(pipeline)
            on_error.pop_all()

    def _enter(self, pipeline: Pipeline) -> None:
        if self._backend is not None:
            self._lane = TorchLane(self.call, pipeline, self._backend, self._signature, self._graphs)

    def _run_here(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a batch outside of a pipeline."""
        values = [to_torch(spec, inputs[spec.name]).to(self._device) for spec in self._signature.inputs]
        taken = {*self._weights, *map(_address, values)}
        return _own_arrays(self.call(values), taken)

    def _keep_to_itself(self, weights: Iterable[torch.Tensor]) -> None:
        """Remember weights that the model may return, so that callers receive copies."""
        self._weights = frozenset(map(_address, weights))


def _own_arrays(outputs: Iterable[torch.Tensor], taken: set[int]) -> list[Array]:
    """Return outputs as arrays that share no memory, so that writing into one changes nothing else.

    Outputs are copied only if their memory is taken, belongs to another output, or does not come from PyTorch, as the
    weights of a compiled model.
    """
    arrays = []
    for output in outputs:
        tensor = output.detach().cpu().contiguous()
        if _address(tensor) in taken or not tensor.untyped_storage().resizable():
            tensor = tensor.clone()
        taken.add(_address(tensor))
        arrays.append(from_torch(tensor))
    return arrays


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which all its views share."""
    return tensor.untyped_storage().data_ptr()


def use_torch_precision(precision: str) -> None:
    """Let PyTorch compute products of 32-bit floats on GPUs in ``f32`` or ``tf32``, in the whole process.

    Convolutions would otherwise be in TF32, which rounds factors to 10 bits: not the numerics that the export proved.

    Raises:
        Unsupported: an earlier model of this process has the other one.
    """
    use_precision(precision)
    with warnings.catch_warnings():
        # PyTorch suggests its newer settings, with which programs that read these, such as its own export, fail.
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def pick_device(device: str, built_for: str | None = None) -> str:
    """Return the device to load to.

    Args:
        device: the request: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``auto:1`` for the second GPU if it can be used,
            or one that a plug-in adds to PyTorch.
        built_for: the only kind of device that the model can run on, or None.

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
    if kind == "auto" and built_for is None and not usable:
        devices.warn_of_unused_gpus("this PyTorch lacks CUDA, or needs a newer NVIDIA driver")
    target = built_for or ("cuda" if usable else "cpu")
    chosen = device if kind != "auto" else target if target == "cpu" else device.replace("auto", target)
    if chosen.startswith("cuda") and not usable:
        raise Unsupported(
            f"device '{chosen}' is not available: PyTorch finds no NVIDIA driver or GPU, or lacks CUDA; --device cpu "
            "runs the model without"
        )
    return f"cuda:{nvml.roomiest()}" if chosen == "cuda" else chosen


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


def run_error(error: Exception) -> IngotError:
    """Return the error to raise for an error of an operator."""
    if isinstance(error, IngotError):
        return error
    reason = str(error).partition("\n")[0]  # the rest is a trace of PyTorch's code
    if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY.search(reason):
        return TooLarge(f"the model needs more memory for this input than there is: {reason}")
    if isinstance(error, _CALLERS) or any(text in reason for text in _REJECTIONS):
        return InvalidArgument(f"the model rejects this input: {reason}")
    return InternalError(f"the engine failed on this input: {type(error).__name__}: {reason}")
