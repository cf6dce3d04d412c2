"""PyTorch on a fake device: each operator is work of the stream, with the memory of an allocator like PyTorch's own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ingot.runtime.engines.pytorch.torch_engine import TorchEngine
from ingot.runtime.engines.pytorch.torch_lane import alike
from ingot.runtime.gpu.graphs import GraphOptions, graphs_of
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.tensors import DType
from tests.runtime.gpu.fake_device import FakeDevice, Span

_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class Allocator:
    """Memory of the device that is free for later work in the same stream as soon as no tensor refers to it."""

    def __init__(self, device: FakeDevice):
        self._device = device
        self._free: dict[int, deque[int]] = {}

    def tensor(self, like: torch.Tensor, stream: int) -> torch.Tensor:
        size = 1 << max(10, (like.numel() * like.element_size() - 1).bit_length())
        free = self._free.setdefault(size, deque())
        address = free.popleft() if free else self._device.allocate(size, stream)
        return at(address, like.size(), like.stride(), like.dtype, functools.partial(free.append, address))


class FakeTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A :class:`ingot.runtime.engines.pytorch.torch_lane.Backend`.

    Attributes:
        launched: operators that were enqueued one by one, those of captures included.
        replays: of graphs, of which the first compares.
        failing: the error of the next captures, if any.
        seconds: virtual duration of an operator.
    """

    def __init__(self, device: FakeDevice, seconds: float = 0.25):
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched = self.replays = 0
        self.failing: Exception | None = None
        self.seconds = seconds
        self._device = device
        self._stream = 0
        self._own, self._shared = Allocator(device), Allocator(device)
        self._memory = self._own

    # The interface.

    def tensor(self, address: int, shape: Sequence[int], dtype: DType) -> torch.Tensor:
        kind = getattr(torch, dtype.torch_name)
        with _disable_current_modes():
            return at(address, shape, torch.empty(shape, device="meta").stride(), kind)

    @contextlib.contextmanager
    def current(self, stream: int) -> Iterator[None]:
        self._stream = stream
        with self:
            yield

    def has(self, tensor: torch.Tensor) -> bool:
        return True

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        stream, self._memory = self._stream, self._shared
        self._device.begin_capture(stream)
        try:
            if self.failing is not None:
                raise self.failing
            work()
        finally:
            recorded = self._device.end_capture(stream)
            self._memory = self._own

        def replay() -> None:
            self.replays += 1
            self._device.replay(recorded, stream)

        return replay

    def alike(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        with _disable_current_modes():
            self._device.run_stream(self._stream)
            return alike(first, second)

    def close(self) -> None:
        """Leave the memory to the test."""

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.returns:  # a check of types and sizes
            return func(*args, **kwargs)
        returned = [each.alias_info for each in func._schema.returns]
        written = [
            args[place]
            for place, argument in enumerate(func._schema.arguments[: len(args)])
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written and any(info is not None for info in returned):
            return func(*args, **kwargs)  # a view
        if written:
            (result,) = written
        else:
            places = tree_map_only(
                torch.Tensor, _meta, (args, {**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
            )
            like = func(*places[0], **places[1])
            result = tree_map_only(torch.Tensor, lambda each: self._memory.tensor(each, self._stream), like)
            if func.__name__.partition(".")[0] in _EMPTY:
                return result
        self.launched += 1
        self._enqueue(func, args, kwargs, result, in_place=bool(written))
        return result

    def _enqueue(self, func: Any, args: Any, kwargs: Any, result: Any, *, in_place: bool) -> None:
        reads: list[Span] = []

        def described(tensor: torch.Tensor) -> _Place:
            if self._device.holds(tensor.data_ptr()):
                reads.append(_span(tensor))
                return _Place(tensor)
            return _Place(tensor, tensor)  # a weight

        given = tree_map_only(torch.Tensor, described, (args, kwargs))
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        targets, writes = [_Place(each) for each in results], [_span(each) for each in results]
        device = self._device

        @torch.no_grad()
        def act() -> None:
            for address, nbytes in (*reads, *writes):
                if nbytes:
                    device._check_device((address, nbytes))
            inputs, options = tree_map_only(_Place, _Place.tensor, given)
            found = func(*inputs, **options)
            if not in_place:
                made = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
                for target, each in zip(targets, made, strict=True):
                    if each.numel():  # statistics of a batch, which only some devices return
                        target.tensor().copy_(each)

        self._device.work(self._stream, reads, writes, self.seconds, act)


class _Place:
    """Where a tensor is, without keeping its memory."""

    def __init__(self, tensor: torch.Tensor, kept: torch.Tensor | None = None):
        self._how = tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
        self._kept = kept

    def tensor(self) -> torch.Tensor:
        return at(*self._how) if self._kept is None else self._kept


def at(
    address: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    freed: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return memory as a tensor; ``freed`` is called when no tensor refers to it."""
    if not torch.Size(size).numel():
        return torch.empty(size, dtype=dtype)
    count = 1 + sum((dim - 1) * step for dim, step in zip(size, stride, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    if freed is not None:
        weakref.finalize(memory, freed).atexit = False
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(size, stride)


def _span(tensor: torch.Tensor) -> Span:
    count = 1 + sum((dim - 1) * step for dim, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), count * tensor.element_size() if tensor.numel() else 0


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def pipelined(engine: Any, device: FakeDevice, graphs: GraphOptions | None = None) -> TorchEngine:
    """Let an engine of PyTorch on the CPU run in a pipeline on a fake device."""
    assert isinstance(engine, TorchEngine)
    engine._backend = FakeTorch(device)
    engine._graphs = graphs_of(engine.signature, graphs)
    engine._pipeline = pipeline = Pipeline(device)
    engine._device = device.name
    engine._enter(pipeline)
    return engine
