"""A pipeline as a model of the server: the same methods as :class:`~ingot.runtime.Model` has for the data plane."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ingot.config.pipelines import PipelineConfig
from ingot.errors import IngotError, NotFound, Unavailable, Unsupported
from ingot.model_store.format import goldens
from ingot.protocol.context import BatchTimes
from ingot.protocol.keys import Step
from ingot.runtime import Limits, Metrics, Model, Outcome, Request, Settings, State
from ingot.runtime.dispatch.pending import Expiry
from ingot.runtime.dispatch.statistics import Duration, Statistics
from ingot.runtime.dispatch.stepped import Aside, preparing
from ingot.runtime.dispatch.streams import Streams
from ingot.runtime.engines.isolation.step_processes import StepProcesses
from ingot.runtime.gpu.array import Direct
from ingot.runtime.loading.item_processes import processes_of
from ingot.runtime.scheduling.entry import size_of
from ingot.runtime.scheduling.queue import check_room
from ingot.runtime.settings.repeat import Repeat
from ingot.serving.pipelines import pictures, replay
from ingot.serving.pipelines.face import described
from ingot.serving.pipelines.pictures import Work
from ingot.serving.pipelines.plan import Find, Plan, PlannedNode, planned
from ingot.serving.pipelines.run import Run
from ingot.steps import Apply, Steps
from ingot.tensors import Signature, check_inputs

log = logging.getLogger(__name__)

VERSION = "1"
"""The version of every pipeline: its models have their own."""
_LEFT = "pipelines have no {}; ask the node's model itself"


class Pipeline:
    """A pipeline of models that this server has. All of it belongs to the event loop.

    A node's model is looked up for each request, so that versions, aliases, canaries and the memory budget apply. When
    one of them is another model than before, the pipeline is planned again.

    Args:
        config: checked by itself.
        find: returns a model of this server.
        settings: of the server: the limits of the queue, and how files are decoded.
        metrics: where to count.

    Raises:
        InvalidConfig: a model is missing, or does not fit.
        Unsupported: a package that a step needs is missing.
    """

    version = VERSION
    platform = "ingot_pipeline"
    device = "cpu"
    variant = digest = ""
    number = 0
    sequential = decoupled = False
    repeat: Repeat | None = None
    streams: Streams | None = None
    labels: tuple[str, ...] = ()
    direct = Direct()
    last_batch: BatchTimes | None = None
    reason = ""

    def __init__(self, config: PipelineConfig, find: Find, settings: Settings, metrics: Metrics):
        self.config = config
        self.name = config.name
        self._unplaced = replace(config, place="", node_places={})  # clients see its errors later on
        self._find = find
        self._limits: Limits = settings.limits
        self._metrics = metrics
        self._decoding: StepProcesses | None = None
        self._plan = planned(config, find)
        self._goldens = goldens.decode(config.goldens) if config.goldens else ()
        self._replayed: Plan | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._departed = f"the goldens of pipeline '{self.name}' are being replayed" if self._goldens else ""
        self.steps = described(self._plan)
        self._works = self._opened(settings)
        self._runs: set[Run] = set()
        self._bytes = 0
        self._expiry = Expiry(self.name)
        self._counted = Statistics()
        self._spent = {name: Duration() for name in config.table.nodes}
        self._items = Counter[str]()
        self._seconds = {name: metrics.node_seconds.labels(self.name, VERSION, name) for name in config.table.nodes}

    def publish(self) -> None:
        """Let the metrics of its name show this pipeline."""
        labels = (self.name, VERSION)
        self._metrics.ready.labels(*labels).set_function(lambda: self.ready)
        self._metrics.in_flight.labels(*labels).set_function(lambda: len(self._runs))

    def _opened(self, settings: Settings) -> dict[str, Work]:
        nodes = {node.name: node.node for node in self._plan.nodes if node.model is None}
        if not nodes:
            return {}
        decode: Apply
        if settings.isolate == "none" or all(node.step == "row" for node in nodes.values()):
            decode = pictures.DECODER.open(lambda name: b"")
        else:
            self._decoding = processes_of(pictures.DECODER, settings)
            self._decoding.supervise(self.name, lambda ending: None)  # it is logged, and another is started
            preparing.submit(self.name, self._decoding.check)  # the first request does not wait for a process then
            decode = self._decoding.apply
        return {name: pictures.opened(node, decode) for name, node in nodes.items()}

    @property
    def models(self) -> list[str]:
        """The names of its nodes' models."""
        return [node.address[0] for node in self._plan.nodes if node.model is not None]

    @property
    def acceptor(self) -> Pipeline:
        """The data plane submits to ``acceptor.accepting``, which a model replaces with its state."""
        return self

    @property
    def accepting(self) -> Pipeline:
        """See :attr:`acceptor`."""
        return self

    @property
    def ready(self) -> bool:
        """Whether all its models accept requests."""
        return not self.fault()

    @property
    def state(self) -> State:
        return State.READY if self.ready else State.UNLOADED

    def fault(self) -> str:
        """Return why requests are refused now, with the name of the node; empty if they are not."""
        try:
            plan = self._current()
        except IngotError as error:
            return str(error)
        for node in plan.nodes:
            if node.model is not None and not node.model.ready:
                return f"node '{node.name}' of pipeline '{self.name}' is not ready: {node.model.acceptor.unavailable()}"
        return ""

    @property
    def signature(self) -> Signature:
        """The inputs and outputs."""
        return self._plan.signature

    @property
    def properties(self) -> Mapping[str, str]:
        """Which models its nodes run."""
        return {f"node.{node.name}": node.node.model or node.node.step for node in self._plan.nodes}

    def steps_for(self, inputs: Iterable[str]) -> Steps:
        """Return the description of its inputs and outputs; see :func:`~ingot.serving.pipelines.face.described`."""
        return self.steps

    def submit(self, request: Request) -> Run:
        """Accept a request; see :meth:`ingot.runtime.Model.submit`.

        Raises:
            InvalidArgument: the inputs do not fit the signature.
            Unavailable: a node's model is missing, or not ready, or too many requests are in flight.
        """
        plan = self._current()
        check_inputs(plan.signature, request.inputs)
        nbytes = sum(size_of(array) for array in request.inputs.values())
        check_room(self._limits, len(self._runs), self._bytes, nbytes, request.client, self._held)
        run = Run(self, plan, request, nbytes)
        try:
            run.start()
        except IngotError:
            self._counted.failed.add(time.perf_counter() - run.began)
            raise
        if request.timeout is not None:
            self._expiry.add(asyncio.get_running_loop(), run, request.timeout)
        self._runs.add(run)
        self._bytes += nbytes
        return run

    def _current(self) -> Plan:
        """Return the plan for the models that answer now.

        Raises:
            Unavailable: a model is missing, or one of another version does not fit or departs from the goldens.
        """
        if not self._same_models():
            try:
                self._plan = planned(self._unplaced, self._find)
            except IngotError as error:
                raise Unavailable(f"{error}; no request can be answered until this is repaired") from error
            self.steps = described(self._plan)
            if self._goldens:
                self._replaying = asyncio.get_running_loop().create_task(self.replay())
        if self._departed:
            raise Unavailable(self._departed)
        return self._plan

    async def replay(self) -> None:
        """Replay the goldens once on the models that answer now; requests are refused while a node departs."""
        with contextlib.suppress(Unavailable):
            self._current()
        if not self._goldens or (plan := self._plan) is self._replayed:
            return
        self._replayed = plan
        departed = await replay.fault(self, plan, self._goldens)
        if plan is self._plan:
            self._departed = departed
            if departed:
                log.error("%s", departed)

    def _same_models(self) -> bool:
        nodes = ((node.address, node.model) for node in self._plan.nodes if node.model is not None)
        try:
            return all(self._find(*address) is model for address, model in nodes)
        except NotFound:
            return False

    def _held(self, client: Hashable) -> tuple[int, int]:
        held = [run.nbytes for run in self._runs if run.client == client]
        return len(held), sum(held)

    def model_of(self, node: PlannedNode) -> Model:
        """Return the model that answers for a node now.

        Raises:
            NotFound: it is not served any longer.
        """
        return self._find(*node.address)

    def work_of(self, node: PlannedNode) -> Work:
        """Return the function of a node that is a step."""
        return self._works[node.name]

    def spent(self, node: PlannedNode, seconds: float, items: int) -> None:
        """Count a node that has ended."""
        self._spent[node.name].add(seconds)
        self._items[node.name] += items
        self._seconds[node.name].observe(seconds)

    def over(self, run: Run, outcome: Outcome | None) -> None:
        """Count a request that is over; None if it was cancelled."""
        if run not in self._runs:
            return
        self._runs.discard(run)
        self._bytes -= run.nbytes
        counted, seconds = self._counted, time.perf_counter() - run.began
        if outcome is None:
            return
        if isinstance(outcome, IngotError):
            counted.failed.add(seconds)
        else:
            counted.answered.add(seconds)
            counted.samples += run.rows
            counted.last = time.time()

    def statistics(self) -> Statistics:
        """Return the counts so far; ``nodes`` has how often each node ran, for how many items, and its time."""
        nodes = {
            name: {"count": spent.count, "ns": int(1e9 * spent.seconds), "items": self._items[name]}
            for name, spent in self._spent.items()
        }
        about: dict[str, Any] = {"state": self.state.value, "device": self.device, "variant": "", "engine": {}}
        limits = {"batching": False, "max_batch": 0, "instances": 1, "cached": False, "digest": "", "variants": []}
        return self._counted.copy(Duration(), {**about, **limits, "nodes": nodes})

    def close(self) -> None:
        """End its processes; requests in flight end with the models."""
        if self._decoding is not None:
            self._decoding.close()

    def submit_step(self, step: Step, request: Request) -> NoReturn:
        """Refuse a step of a sequence.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(_LEFT.format("sequences"))

    def drop_sequence(self, step: Step) -> None:
        """Have no effect, as there are no sequences."""

    async def with_steps(self, work: Aside[Any], nbytes: int, client: Hashable) -> NoReturn:
        """Refuse other work with steps.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(_LEFT.format("tokenizer"))
