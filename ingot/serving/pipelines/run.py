"""One request of a pipeline: each node runs as soon as its inputs exist, as requests to its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ingot.config.pipelines import Condition, Ref, Refs
from ingot.errors import CLASSES, DeadlineExceeded, IngotError, InternalError, InvalidArgument
from ingot.faults import attempt
from ingot.protocol.context import CONTEXT
from ingot.runtime import Model, Outcome, Request, Submitted
from ingot.runtime.scheduling.entry import OVER, ignore
from ingot.serving.pipelines.calls import ModelCall, StepCall
from ingot.serving.pipelines.pictures import Work
from ingot.serving.pipelines.plan import Path, Plan, PlannedNode
from ingot.serving.pipelines.values import Level, Value, first_of, gathered, scattered, spread
from ingot.steps.ragged import filled
from ingot.tensors import Array

# Most items of a node, of all rows of a request.
_MOST_ITEMS = 1 << 14


class Owner(Protocol):
    """The pipeline."""

    name: str

    def model_of(self, node: PlannedNode) -> Model:
        """Return the model that answers for a node now; raises NotFound."""

    def work_of(self, node: PlannedNode) -> Work:
        """Return the function of a node that is a step."""

    def spent(self, node: PlannedNode, seconds: float, items: int) -> None:
        """Count a node that has ended."""

    def over(self, run: Run, outcome: Outcome | None) -> None:
        """Record that a request is over, with its outcome, or None if it was cancelled."""


class Run:
    """A request of a pipeline, from its submission to its answer. All of it belongs to the event loop.

    Args:
        owner: the pipeline.
        plan: the pipeline's plan.
        request: its inputs fit the plan's signature.
        nbytes: the bytes of its inputs.

    Attributes:
        between: set to a dictionary, it has what each node returned when the answer comes, as ``NODE.OUTPUT``.
    """

    __slots__ = ("_calls", "_context", "_levels", "_node_began", "_owner", "_plan", "_until", "_values", "_waits",
                 "began", "between", "client", "done", "nbytes", "request",
                 "rows")  # fmt: skip

    def __init__(self, owner: Owner, plan: Plan, request: Request, nbytes: int):
        self.request = request
        self.client = request.client
        self.nbytes = nbytes
        self.done = False
        self.between: dict[str, Array] | None = None
        self.began = time.perf_counter()
        self.rows = len(next(iter(request.inputs.values())))
        self._owner = owner
        self._plan = plan
        self._context = CONTEXT.get()
        if self._context is not None:  # the context of a stream has the nodes of an earlier request
            self._context.nodes = ()
        self._until = None if request.timeout is None else self.began + request.timeout
        self._values = {Ref("", name): Value(array) for name, array in request.inputs.items()}
        self._levels: dict[Path, Level] = {(): Level(self.rows)}
        self._waits = {node.name: len(node.needs) for node in plan.nodes}
        self._calls: dict[str, Submitted] = {}
        self._node_began: dict[str, float] = {}

    def start(self) -> None:
        """Begin the nodes that read only inputs of the pipeline.

        Raises:
            IngotError: a node is refused; no node runs then.
        """
        for node in self._plan.nodes:
            if not node.needs and (error := self._attempted(node)) is not None:
                self._end()
                raise error

    @property
    def waiting(self) -> bool:
        """Always false, as the first nodes run at once; see :class:`~ingot.runtime.dispatch.pending.Expires`."""
        return False

    def cancel(self) -> None:
        """Drop the request, as its client left, and cancel its nodes."""
        if not self.done:
            self._end()
            self._owner.over(self, None)

    def fail(self, error: IngotError) -> None:
        """Answer the request with an error, and cancel its nodes."""
        if not self.done and isinstance(error, DeadlineExceeded) and self._calls:
            running = ", ".join(f"'{name}'" for name in self._calls)
            error = DeadlineExceeded(f"{error}; it was in node {running}")
        self._reply(error)

    def _attempted(self, node: PlannedNode) -> IngotError | None:
        """Begin a node; return the error if that fails."""
        error = attempt(f"node '{node.name}' of pipeline '{self._owner.name}' failed", self._begin, node)
        return None if error is None else _named(error, node, None)

    def _begin(self, node: PlannedNode) -> None:
        """Run a node for the items whose conditions hold and whose inputs exist."""
        level = self._level(node)
        inputs, ran = self._inputs(node, level)
        index = None if ran is None or ran.all() else np.flatnonzero(ran)
        if index is not None:
            inputs = {name: array[index] for name, array in inputs.items()}
        count = level.size if index is None else len(index)
        self._node_began[node.name] = time.perf_counter()

        def settle(outcome: Mapping[str, Array] | IngotError, item: int | None = None) -> None:
            if not self.done:
                self._settle(node, level, index, count, outcome, item)

        CONTEXT.set(self._context)
        if not count:
            asyncio.get_running_loop().call_soon(settle, _nothing(node))
        elif node.model is None:
            work, output = self._owner.work_of(node), node.outputs[0].name
            self._calls[node.name] = StepCall(self._owner.name, work, output, inputs, settle)
        else:
            inner = Request(inputs, ignore, None, self.request.priority, None, self.client)
            requests = count if node.separate else 1
            call = ModelCall(self._owner.model_of(node), inner, requests, self._time_left, settle)
            self._calls[node.name] = call
            call.start()

    def _time_left(self) -> float | None:
        """Return the seconds until the request's deadline.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        if self._until is None:
            return None
        left = self._until - time.perf_counter()
        if left <= 0:
            raise DeadlineExceeded("the request's time was over before it began")
        return left

    def _level(self, node: PlannedNode) -> Level:
        """Return the level of a node's items; that of a node with ``each`` is made here.

        Raises:
            InvalidArgument: there are too many items.
        """
        if not node.node.columns:
            return self._levels[node.level]
        outer = self._levels[node.level[:-1]]
        if node.node.count:
            array, ran = self._spread(Ref.parse(node.node.count), outer)
            counts = array.clip(0) if ran is None else np.where(ran, array, 0).clip(0)
        else:
            columns = self._spread(node.node.sources[node.node.columns[0]][0], outer).array
            counts = np.full(len(columns), columns.shape[1])
        if (total := int(counts.sum(dtype=np.float64))) > _MOST_ITEMS:
            raise InvalidArgument(f"it has {total} items, over the limit of {_MOST_ITEMS}; divide the request")
        level = self._levels[node.level] = Level.of_counts(outer, counts.astype(np.intp))
        return level

    def _inputs(self, node: PlannedNode, level: Level) -> tuple[dict[str, Array], Array | None]:
        """Return the inputs of a node for each item of its level, and for which items it runs."""
        if node.plain is not None:
            values = {name: self._values[ref] for name, ref in node.plain.items()}
            if all(value.ran is None for value in values.values()):
                return {name: value.array for name, value in values.items()}, None
        inputs: dict[str, Array] = {}
        masks = [_holds(condition, self._value(node, level, condition.ref)) for condition in node.node.conditions]
        for name, refs in node.node.sources.items():
            value = first_of([self._value(node, level, ref) for ref in refs])
            inputs[name] = value.array
            if value.ran is not None:
                masks.append(value.ran)
        return inputs, np.logical_and.reduce(masks) if masks else None

    def _value(self, node: PlannedNode, level: Level, ref: Ref) -> Value:
        """Return a value for each item of a node's level."""
        if ref not in node.columns or level.outer is None:
            return self._spread(ref, level)
        value = self._spread(ref, level.outer)
        longest = int(level.counts.max(initial=0))
        if longest > value.array.shape[1]:
            raise InvalidArgument(f"'{node.node.count}' counts {longest} items, but '{ref}' has {value.array.shape[1]}")
        ran = None if value.ran is None else value.ran[level.rows]
        return Value(value.array[level.rows, level.columns], ran)

    def _spread(self, ref: Ref, level: Level) -> Value:
        return spread(self._values[ref], self._levels[self._plan.levels[ref.node]], level)

    def _settle(
        self,
        node: PlannedNode,
        level: Level,
        index: Array | None,
        count: int,
        outcome: Mapping[str, Array] | IngotError,
        item: int | None,
    ) -> None:
        """Keep the outputs of a node, and begin the nodes that waited for it."""
        self._calls.pop(node.name, None)
        if isinstance(outcome, IngotError):
            place = item if item is None or index is None else int(index[item])
            self._reply(_named(outcome, node, place))
            return
        ended = time.perf_counter()
        if count:
            self._owner.spent(node, ended - self._node_began[node.name], count)
            if self._context is not None:
                self._context.nodes = (*self._context.nodes, (node.name, self._node_began[node.name], ended))
        failure = f"node '{node.name}' of pipeline '{self._owner.name}' failed"
        error = attempt(failure, self._keep, node, level, index, count, outcome)
        if error is not None:
            self._reply(_named(error, node, None))
            return
        # A tick later, when all requests of the batch have their answers, so that their next nodes can share a batch.
        asyncio.get_running_loop().call_soon(self._continue, node)

    def _keep(
        self, node: PlannedNode, level: Level, index: Array | None, count: int, outputs: Mapping[str, Array]
    ) -> None:
        ran = None
        if index is not None:
            ran = np.zeros(level.size, bool)
            ran[index] = True
        for spec in node.outputs:
            array = outputs.get(spec.name)
            if array is None or len(array) != count:
                found = "nothing" if array is None else f"{len(array)} rows"
                raise InternalError(f"its model returned {found} as '{spec.name}' for {count} items")
            kept = array if index is None else scattered(array, index, level.size)
            self._values[Ref(node.name, spec.name)] = Value(kept, ran)

    def _continue(self, ended: PlannedNode) -> None:
        """Begin the nodes that waited for nothing but ``ended``; reply after the last node."""
        if self.done:
            return
        del self._waits[ended.name]
        for node in self._plan.nodes:
            if ended.name in node.needs:
                self._waits[node.name] -= 1
                if not self._waits[node.name] and (error := self._attempted(node)) is not None:
                    self._reply(error)
                    return
        if not self._waits:
            self._reply(attempt(f"the outputs of pipeline '{self._owner.name}' cannot be joined", self._outputs))

    def _outputs(self) -> dict[str, Array]:
        if self.between is not None:
            self.between |= {str(ref): value.array for ref, value in self._values.items() if ref.node}
        return {name: self._output(refs) for name, refs in self._plan.outputs.items()}

    def _output(self, refs: Refs) -> Array:
        level = self._levels[self._plan.levels[refs[0].node]]
        return gathered(first_of([self._values[ref] for ref in refs]), level)

    def _reply(self, outcome: Outcome) -> None:
        if self.done:
            return
        reply = self.request.reply
        self._end()
        self._owner.over(self, outcome)
        CONTEXT.set(self._context)
        attempt("a reply failed", reply, outcome)  # the caller may answer other requests too

    def _end(self) -> None:
        """Cancel the calls that run, and drop all references, as replies refer back to this object."""
        self.done = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()
        self.request, self._values, self._levels = OVER, {}, {}


def _holds(condition: Condition, value: Value) -> Array:
    """Return for which items a condition holds; of several values of an item the first counts."""
    if not value.array.size:  # there are no items, or none has a value
        return np.zeros(len(value.array), bool)
    first = value.array.reshape(len(value.array), -1)[:, 0]
    holds = np.ones(len(first), bool) if value.ran is None else value.ran.copy()
    if isinstance(equal := condition.equals, str):
        holds &= np.array([each in (equal, equal.encode()) for each in first.tolist()], bool)
    elif equal is not None:
        holds &= first == equal
    if condition.above is not None:
        holds &= first > condition.above
    if condition.below is not None:
        holds &= first < condition.below
    return holds


def _nothing(node: PlannedNode) -> dict[str, Array]:
    """Return the outputs of a node without items."""
    return {
        spec.name: filled((0, *(size if isinstance(size, int) else 0 for size in spec.shape[1:])), spec.dtype.numpy)
        for spec in node.outputs
    }


def _named(error: IngotError, node: PlannedNode, item: int | None) -> IngotError:
    """Return a copy of a node's error with the node's name: other requests may have the same error object."""
    place = "" if item is None else f", item {item}"
    return CLASSES[error.code](f"node '{node.name}'{place}: {error}")
