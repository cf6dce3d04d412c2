"""Models within a memory budget: those that are not in memory are loaded when a request comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot import foreign
from ingot.errors import IngotError, Unavailable, shortened
from ingot.report import units
from ingot.runtime import Metrics, Model, State
from ingot.runtime.engines.ort import ort_arena
from ingot.runtime.machine import devices, memory, nvml
from ingot.runtime.scheduling.entry import Request, size_of
from ingot.serving import Repository
from ingot.serving.loading import Tasks, in_thread, load_model
from ingot.serving.waiting import Waiting

log = logging.getLogger(__name__)

Reason = Literal["start", "demand", "rollout"]

_MEASURES: Mapping[str, Callable[[], int]] = {"cpu": memory.proportional, "cuda": nvml.memory_used}
# Seconds after a failed load in which requests are refused instead of trying again.
_PAUSE = 5.0
# Seconds to wait for a leaving model's abandoned engine calls.
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class _Resident:
    """A model under the budget.

    Attributes:
        bytes: the memory that the model took when it was loaded last, by device; empty before the first load.
        seconds: the duration of the last load.
        since: when the model was loaded last, on the clock of ``time.perf_counter``.
        loaded: whether the model is in memory.
        waiting: the requests that wait until the model is in memory.
        bringing: the task that loads the model for them.
        failed: when a load failed last, on the clock of ``time.monotonic``.
        failure: why that load failed.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    since: float = 0.0
    loaded: bool = False
    waiting: list[Waiting] = field(default_factory=list)
    bringing: asyncio.Task[None] | None = None
    failed: float = -_PAUSE
    failure: str = ""


class Residency:
    """Decides which models are in memory. All of it belongs to one event loop.

    The memory of a model is measured: the memory of this process and its engine processes, and that of the GPU, before
    and after each load. The least recently used model leaves first; models that keep states of sequences and models
    with a candidate stay.

    Args:
        repository: the models.
        budget: the most bytes of models by device; empty for no limit.
        loading: the lock that is held while a model is loaded or leaves.
    """

    def __init__(self, repository: Repository, budget: Mapping[str, int], loading: asyncio.Lock):
        self.budget = budget
        self._repository = repository
        self._loading = loading
        self._tasks = Tasks()
        self._residents: dict[Model, _Resident] = {}
        self._base: dict[str, int] = {}
        self._stopped = False
        metrics: Metrics = repository.metrics
        self._loads, self._evictions = metrics.model_loads, metrics.model_evictions
        self._waits, self._bytes = metrics.demand_waits, metrics.model_memory
        self._seconds = metrics.load_seconds
        for device, most in budget.items():
            metrics.memory_budget.labels(device).set(most)

    async def load(self, model: Model, reason: Reason, sizes: Sequence[int] = (), earlier: Model | None = None) -> None:
        """Load a model, after others have left if that is needed; the caller holds ``loading``.

        Args:
            model: a model that is not in memory.
            reason: the label of the load in the metrics.
            sizes: see :meth:`Model.load`.
            earlier: a model that must stay in memory, because ``model`` is to replace it.

        Raises:
            Unavailable: the model does not fit the budget, and is closed again.
            IngotError: the model cannot be loaded.
        """
        began = time.perf_counter()
        if not self.budget:
            await load_model(model, sizes)
            self._residents[model] = _Resident(bytes=_weights(model), loaded=True)
            self._show(model)
        else:
            await self._load_within(model, sizes, earlier)
        self._seconds.labels(model.name, model.version).observe(time.perf_counter() - began)
        self._loads.labels(model.name, model.version, reason).inc()

    async def _load_within(self, model: Model, sizes: Sequence[int], earlier: Model | None) -> None:
        model.check_no_load()  # before others leave for it
        resident = self._residents.setdefault(model, _Resident())
        again = bool(resident.bytes)
        if not self._base:
            await in_thread("import", lambda: foreign.attempt(ort_arena.prepare))
            await in_thread("sweep", sweep)
            self._base = await self._used()
        kept = {model, earlier}
        await self._make_room(resident.bytes or self._expected_bytes(model, earlier), kept)
        before, began = await self._used(), time.perf_counter()
        await load_model(model, sizes, parkable=True)
        await in_thread("sweep", sweep)
        after = await self._used()
        resident.since = time.perf_counter()
        resident.seconds = resident.since - began
        # A load may reuse memory that was free already, but never takes less than its weights.
        least = _weights(model)
        resident.bytes = {device: max(least.get(device, 0), after[device] - before[device]) for device in self.budget}
        resident.loaded = True
        self._show(model)
        if not again:
            try:
                self._check(model, earlier)
            except IngotError:
                await self._close(model, resident)
                raise
        await self._make_room({}, kept)

    def _expected_bytes(self, model: Model, earlier: Model | None) -> dict[str, int]:
        """Return the bytes of ``earlier``, or of another model of the same archive; empty if they are not known."""
        same = [one for one in self._residents if one is earlier or one.digest == model.digest]
        return next((self._residents[one].bytes for one in same if self._residents[one].bytes), {})

    def _check(self, model: Model, earlier: Model | None) -> None:
        """Check that a model fits the budget, together with the one that it is to replace.

        Raises:
            Unavailable: the model does not fit.
        """
        stays = self._residents.get(earlier) if earlier is not None else None
        for device, most in self.budget.items():
            own = self._residents[model].bytes[device]
            others = stays.bytes.get(device, 0) if stays is not None and stays.loaded else 0
            if own + others > most:
                rest = f" and {units.size(others)} of the one that answers" if others else ""
                raise Unavailable(
                    f"model '{model.name}' version {model.version} takes {units.size(own)} of memory{rest}; the budget "
                    f"of the {device} is {units.size(most)}. Raise --memory-budget"
                    + (", or unload the model first" if others else "")
                )

    async def _make_room(self, needed: Mapping[str, int], kept: set[Model | None]) -> None:
        """Let models leave until ``needed`` more bytes are within the budget, or none can leave."""
        while True:
            used = await self._used()
            over = [
                device
                for device, most in self.budget.items()
                if self._model_bytes(device, used) + needed.get(device, 0) > most
            ]
            victim = self._least_used(over, kept) if over else None
            if victim is None:
                return
            await self._park(victim)

    def _model_bytes(self, device: str, used: Mapping[str, int]) -> int:
        """Return the bytes that models take: the sum of their loads, or the growth of the processes if that is more.

        Memory that closed models have not returned counts too: it may make others leave, but refuses no model.
        """
        loads = sum(each.bytes.get(device, 0) for each in self._residents.values() if each.loaded)
        return max(loads, used[device] - self._base[device])

    def _least_used(self, over: Sequence[str], kept: set[Model | None]) -> Model | None:
        """Return the least recently used model that can leave the devices ``over`` their budget, if possible idle."""
        leaving = [
            model
            for deployment in self._repository.deployments.values()
            if (model := deployment.current) is not None
            and model not in kept
            and model.parkable
            and not model.split_up
            and model.state is State.READY
            and (resident := self._residents.get(model)) is not None
            and resident.loaded
            and any(resident.bytes[device] for device in over)
        ]
        return min(leaving, key=lambda model: (model.in_flight > 0, self._last_use(model)), default=None)

    def _last_use(self, model: Model) -> float:
        return max(self._residents[model].since, model.last_use)

    async def _park(self, model: Model) -> None:
        """Let a model leave; requests for it wait from now on until it is loaded again."""
        resident = self._residents[model]
        log.info("model %s version %s leaves the memory", model.name, model.version)
        await model.drain(_Parked(self, model), "it is loaded when a request comes (memory budget)")
        await self._close(model, resident)
        self._evictions.labels(model.name, model.version).inc()

    async def _close(self, model: Model, resident: _Resident) -> None:
        await in_thread("close", lambda: model.close(_CLOSE_SECONDS))
        resident.loaded = False
        self._show(model)
        await in_thread("sweep", sweep)

    async def _used(self) -> dict[str, int]:
        return await in_thread("memory", lambda: {device: _MEASURES[device]() for device in self.budget})

    def _show(self, model: Model) -> None:
        """Set the metric of a model's memory."""
        resident = self._residents[model]
        for device, count in resident.bytes.items():
            self._bytes.labels(model.name, model.version, device).set(count if resident.loaded else 0)

    def wait(self, model: Model, request: Request) -> Waiting:
        """Accept a request for a model that is not in memory, and load it; see :meth:`Dispatcher.submit`.

        Raises:
            Unavailable: the model would not be loaded in time, its last load has just failed, too many requests wait,
                or the server is stopping.
        """
        resident, limits, timeout = self._residents[model], model.settings.limits, request.timeout
        nbytes = sum(size_of(array) for array in request.inputs.values())
        if self._stopped:
            raise Unavailable("the server is stopping")
        if time.monotonic() - resident.failed < _PAUSE:
            raise Unavailable(f"model '{model.name}' could not be loaded: {resident.failure}")
        if timeout is not None and timeout < resident.seconds:
            raise Unavailable(
                f"model '{model.name}' is not in memory, and loading it takes {units.written(resident.seconds)}, "
                "longer than the request's deadline; try again later"
            )
        held = sum(each.nbytes for each in resident.waiting)
        if len(resident.waiting) >= limits.max_queue or (held and held + nbytes > limits.max_queue_bytes):
            raise Unavailable(f"too many requests wait until model '{model.name}' is in memory; try again later")
        self._waits.labels(model.name, model.version).inc()
        longest = timeout if timeout is not None else model.settings.load_timeout
        waiting = Waiting(resident.waiting, request, longest, nbytes)
        if resident.bringing is None:
            resident.bringing = self._tasks.begin(lambda: self._bring(model, resident))
        return waiting

    async def _bring(self, model: Model, resident: _Resident) -> None:
        """Load a model, and pass on the requests that wait for it."""
        error: IngotError = Unavailable("the server is stopping")
        try:
            async with self._loading:
                if model.parked and resident.waiting:
                    await self.load(model, "demand")
                resident.bringing = None
                self._pass_on(resident, model)
        except IngotError as failure:
            resident.failed, resident.failure = time.monotonic(), shortened(str(failure))
            log.error("model %s version %s could not be loaded: %s", model.name, model.version, failure)
            error = Unavailable(f"model '{model.name}' could not be loaded: {resident.failure}")
        finally:
            resident.bringing = None
            for waiting in resident.waiting.copy():
                waiting.settle(error)

    def _pass_on(self, resident: _Resident, model: Model) -> None:
        for waiting in resident.waiting.copy():
            waiting.pass_on(model)

    def replaced(self, model: Model, successor: Model) -> None:
        """Pass the requests that wait for a model on to its successor."""
        if (resident := self._residents.get(model)) is not None:
            self._pass_on(resident, successor)

    def forget(self, model: Model) -> None:
        """Drop the record of a model that is closed; requests that wait for it fail."""
        resident = self._residents.pop(model, None)
        if resident is None:
            return
        for waiting in resident.waiting.copy():
            waiting.settle(Unavailable(f"model '{model.name}' version {model.version} was unloaded"))
        if not any((one.name, one.version) == (model.name, model.version) for one in self._residents):
            for device in resident.bytes:
                self._bytes.remove(model.name, model.version, device)

    def content(self, model: Model) -> dict[str, Any]:
        """Return the memory of a model by device, and whether it is loaded, for JSON; empty without a budget."""
        resident = self._residents.get(model)
        return {} if resident is None or not self.budget else {**resident.bytes, "loaded": resident.loaded}

    def stop(self) -> None:
        """Refuse requests for models that are not in memory, those that wait included."""
        self._stopped = True
        self._tasks.cancel()


class _Parked:
    """Accepts the requests for a model that is not in memory."""

    def __init__(self, residency: Residency, model: Model):
        self._residency = residency
        self._model = model

    def submit(self, request: Request) -> Waiting:
        """Accept a request; see :meth:`Residency.wait`."""
        return self._residency.wait(self._model, request)


def _weights(model: Model) -> dict[str, int]:
    """Return the bytes of the weights of a model's engines, by device."""
    return {devices.kind_of(model.device): model.size * model.instances}


def sweep() -> None:
    """Return to the system the memory that closed models still hold."""
    memory.return_large_blocks()
    ort_arena.give_back()
    memory.trim()
