"""Which GPUs a model runs on, and how large its batches may be, by the memory that it needs and what is free."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from ingot import foreign
from ingot.errors import Unavailable
from ingot.report.units import size
from ingot.runtime.gpu.opening import open_device
from ingot.runtime.machine import devices, nvml
from ingot.runtime.settings.settings import Settings

log = logging.getLogger(__name__)

# Least seconds over which the load of a model is measured.
_INTERVAL = 1.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """The memory that one instance of a model needs on a GPU.

    ``weights`` are bytes, ``activations`` returns those of a batch, by its samples, and ``most`` is how many samples a
    batch may have. ``own`` is whether the engine runs in this process.
    """

    weights: int
    activations: Callable[[int], int] = lambda samples: 0
    most: int = 1
    own: bool = True

    def of(self, samples: int) -> int:
        """Return the bytes with batches of so many samples."""
        return self.weights + self.activations(samples)


@dataclass(eq=False, kw_only=True)
class Placement:
    """Where the instances of a model run. It counts on its GPUs until :meth:`release`.

    Attributes:
        devices: of each instance. ``auto:1`` is the second GPU if the engine can use it, and otherwise the CPU.
        max_batch: most samples of a batch for which there is memory.
        reason: why these devices, for users; empty if there was no choice.
        planned: bytes that the model needs, by GPU, such as ``cuda:1``.
        measured: bytes that it took until it was ready, by GPU; empty before.
        before: bytes that were in use before it was loaded, by GPU.
    """

    devices: Sequence[str]
    max_batch: int = sys.maxsize
    reason: str = ""
    planned: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, int] = field(default_factory=dict)
    _engine_seconds: Callable[[], float] = lambda: 0.0
    _since: float = math.inf
    _seconds: float = 0.0
    _load: float = 0.0

    def ready(self, engine_seconds: Callable[[], float]) -> None:
        """Replace the plan by what the model has taken; ``engine_seconds`` returns those of all its calls so far."""
        used = {device: _used(device) for device in self.before}
        self.measured = {device: max(0, after - self.before[device]) for device, after in used.items() if after}
        self._engine_seconds, self._since, self._seconds = engine_seconds, time.monotonic(), engine_seconds()

    def load(self) -> float:
        """Return the engine seconds per second lately: up to one for each GPU, as its batches wait for each other."""
        now, seconds = time.monotonic(), self._engine_seconds()
        if now - self._since >= _INTERVAL:
            self._load = min(1.0, (seconds - self._seconds) / (now - self._since) / len(self.planned))
            self._since, self._seconds = now, seconds
        return self._load

    def release(self) -> None:
        """Stop counting on its GPUs: the model is closed, or runs on the CPU."""
        with _PLACING:
            _PLACED.discard(self)


_PLACED: weakref.WeakSet[Placement] = weakref.WeakSet()
_PLACING = Lock()
contexts: dict[str, int] = {}
"""Bytes of memory that the context of each GPU took which this process has used."""


@dataclass
class _Gpu:
    """A GPU that can be chosen: the bytes that are free, infinite if unknown, and the share of time that it is busy."""

    name: str
    free: float
    busy: float
    copies: int = 0

    def __str__(self) -> str:
        free = "an unknown amount" if self.free == math.inf else size(max(0, int(self.free)))
        return f"{self.name} ({free} free, {self.busy:.0%} busy)"


def place(model: str, needed: Callable[[], Need | None], settings: Settings) -> Placement:
    """Choose the devices of a model's instances, and limit its batches to what fits.

    Of several GPUs, instances are spread over those on which the largest batch fits, the least busy and then those with
    the most free memory first.

    Args:
        model: its name, for messages.
        needed: returns what an instance needs; None if it cannot run on an NVIDIA GPU. Called if it might.
        settings: how it is run.

    Raises:
        Unavailable: there is too little memory for a single sample.
    """
    named, count = settings.devices, settings.instances * len(settings.devices)
    kind, colon, _ = settings.device.partition(":")
    if settings.shards > 1 and kind == "auto" and devices.has_cuda():
        named = ["cuda"]  # a process that cannot use its GPU then fails, instead of running on the CPU
    placeable = kind in ("auto", "cuda") and settings.shards == 1  # a divided model has a GPU for each process
    need = needed() if placeable and devices.has_cuda() else None
    if need is None:
        return Placement(devices=[*itertools.islice(itertools.cycle(named), count)])
    with _PLACING:
        indices = [devices.index_of(each) for each in named] if colon else range(devices.gpu_count())
        gpus = [_look(index, settings) for index in indices]
        chosen: list[_Gpu] = []
        for number in range(count):
            gpu = gpus[number % len(gpus)] if colon else min(gpus, key=lambda each: _rank(each, need))
            gpu.copies += 1
            chosen.append(gpu)
        found = Placement(devices=[gpu.name.replace("cuda", kind) for gpu in chosen])
        used = [gpu for gpu in gpus if gpu.copies]
        if not colon and len(gpus) > 1:
            others = [gpu for gpu in gpus if not gpu.copies]
            found.reason = " and ".join(map(str, used)) + (f" rather than {', '.join(map(str, others))}" * bool(others))
            log.info("model %s: placed on %s", model, found.reason)
        found.max_batch = _fitting(model, need, used, settings)
        found.planned = {gpu.name: gpu.copies * need.of(int(found.max_batch)) for gpu in used}
        for gpu in used if need.own else ():
            _open_context(gpu.name)
        found.before = {gpu.name: _used(gpu.name) for gpu in used}
        _PLACED.add(found)
    return found


def _look(index: int, settings: Settings) -> _Gpu:
    name, found = f"cuda:{index}", nvml.memory_of(index)
    there = [each for each in _PLACED if name in each.planned]
    free = math.inf
    if found is not None:
        # Memory that is planned for models that are still loaded is not in use yet.
        free = found.free - sum(each.planned[name] for each in there if not each.measured)
        if "cuda" in settings.memory_budget:  # for which the others leave
            free += sum(each.measured.get(name, 0) for each in there)
    busy = sum(each.load() for each in there) or nvml.utilization_of(index) or 0.0
    return _Gpu(name, free, min(1.0, busy))


def _rank(gpu: _Gpu, need: Need) -> tuple[bool, int, float, float]:
    fits = (gpu.copies + 1) * need.of(need.most) <= gpu.free
    return not fits, gpu.copies, round(gpu.busy, 1), -gpu.free


def _fitting(model: str, need: Need, gpus: Sequence[_Gpu], settings: Settings) -> int:
    """Return the most samples of a batch for which there is memory on all GPUs.

    Raises:
        Unavailable: there is not enough for one.
    """
    rooms = [(gpu.free / gpu.copies, f"free on {gpu.name}", "choose another --device") for gpu in gpus]
    if (budget := settings.memory_budget.get("cuda")) is not None:
        rooms.append((budget / sum(gpu.copies for gpu in gpus), "its budget", "raise --memory-budget"))
    room, what, remedy = min(rooms)
    samples = bisect_right(range(1, need.most + 1), room, key=need.of)
    if samples == need.most:
        return samples
    wanted = need.most if samples else 1
    needed = (
        f"it needs {size(need.of(wanted))} for batches of {wanted} ({size(need.weights)} of weights, "
        f"{size(need.activations(wanted))} of activations) in each instance, and {size(max(0, int(room)))} are {what}"
    )
    if not samples:
        raise Unavailable(f"model '{model}' does not fit: {needed}; {remedy}")
    log.warning(
        "model %s: batches have at most %d samples: %s; set --max-batch %d, or %s",
        model,
        samples,
        needed,
        samples,
        remedy,
    )
    return samples


def _open_context(name: str) -> None:
    """Open a GPU's context, which takes memory that is not the first model's."""
    before = _used(name)
    if name not in contexts and foreign.attempt(lambda: open_device(name)) is not None:
        contexts[name] = max(0, _used(name) - before)


def _used(device: str) -> int:
    found = nvml.memory_of(devices.index_of(device))
    return 0 if found is None else int(found.used)
