"""Pipeline parallelism: a program cut into consecutive stages, each in its own process."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ingot import foreign
from ingot.errors import IngotError, InvalidArgument
from ingot.runtime.engines.ipc.records import decode_error, encode_error
from ingot.runtime.engines.pytorch.torch_engine import run_error
from ingot.runtime.engines.sharding.collectives import Form, Value, contents, in_step, no_sizes, room_for, sizes_of

Send = tuple[dist.Work, torch.Tensor]
# How far the weights of a stage may be from an equal share, as part of it, so that less crosses to the next one.
_SLACK = 0.1


@dataclass(frozen=True)
class Stage:
    """Consecutive operators of a program.

    ``incoming`` are the values that it gets from the stage before, of the first one the inputs of the program;
    ``outgoing`` are those that it passes on, of the last one the outputs. ``weights`` are the names of its weights.
    """

    nodes: frozenset[fx.Node]
    incoming: tuple[fx.Node, ...]
    outgoing: tuple[fx.Node, ...]
    weights: frozenset[str]

    def module(self, owner: fx.GraphModule) -> fx.GraphModule:
        """Return a module that computes the outgoing values from the incoming ones, with the weights of this stage.

        Args:
            owner: the program, perhaps on another device than the one that was cut.
        """
        graph = fx.Graph()
        copies = {node.name: graph.placeholder(node.name) for node in self.incoming}
        own = {node.name for node in self.nodes}
        for node in owner.graph.nodes:
            if node.name in own or (node.op == "get_attr" and node.target in self.weights):
                copies[node.name] = graph.node_copy(node, lambda source: copies[source.name])
        graph.output(tuple(copies[node.name] for node in self.outgoing))
        return fx.GraphModule(owner, graph)


def stages_of(module: fx.GraphModule, count: int) -> list[Stage]:
    """Cut a functional program into stages with about the same bytes of weights, where few bytes cross.

    Raises:
        InvalidArgument: there are fewer places to cut than needed.
    """
    values = _Values(module.graph)
    cuts = [0, *_cuts(_held(module, values.operators), values, count), len(values.operators)]
    found = []
    for start, end in pairwise(cuts):
        nodes = frozenset(values.operators[start:end])
        incoming, outgoing = values.crossing(start), values.crossing(end)
        read = {source for node in nodes for source in node.all_input_nodes} | {*outgoing}
        weights = frozenset(str(node.target) for node in read if node.op == "get_attr")
        found.append(Stage(nodes, tuple(incoming), tuple(outgoing), weights))
    return found


class _Values:
    """The operators of a graph in order, and which values are in use between two of them."""

    def __init__(self, graph: fx.Graph):
        self.inputs = graph.find_nodes(op="placeholder")
        self.operators = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        self.outputs: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        at = {node: number for number, node in enumerate(self.operators)}
        self._last = {
            node: len(at) if node in self.outputs else max((at.get(user, -1) for user in node.users), default=-1)
            for node in (*self.inputs, *self.operators)
        }

    def crossing(self, cut: int) -> list[fx.Node]:
        """Return the values that operators from number ``cut`` on need from before; at the ends, inputs and outputs."""
        if cut == 0:
            return self.inputs
        if cut == len(self.operators):
            return self.outputs
        return [node for node in (*self.inputs, *self.operators[:cut]) if self._last[node] >= cut]


def _held(module: fx.GraphModule, order: Sequence[fx.Node]) -> list[int]:
    """Return the bytes of weights that each operator is the first to read."""
    seen: set[str] = set()
    found = []
    for node in order:
        names = {str(item.target) for item in node.all_input_nodes if item.op == "get_attr"} - seen
        seen |= names
        values = (operator.attrgetter(name)(module) for name in names)
        found.append(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
    return found


def _cuts(held: Sequence[int], values: _Values, count: int) -> Iterator[int]:
    before = [0, *accumulate(held)]
    share = before[-1] / count
    last = 0
    for number in range(1, count):
        off = {cut: abs(before[cut] - number * share) for cut in range(last + 1, len(held) - (count - number - 1))}
        best: list[tuple[int, float, int]] = []
        window = math.inf
        for cut in sorted(off, key=off.__getitem__):
            if off[cut] > window:
                break
            nodes = values.crossing(cut)
            if all(map(_can_cross, nodes)):
                best.append((sum(map(_nbytes, nodes)), off[cut], cut))
                window = min(window, max(off[cut], _SLACK * share))
        if not best:
            raise InvalidArgument(
                f"the model cannot be cut into {count} stages: it has too few operators; serve it with fewer --shards"
            )
        last = min(best)[2]
        yield last


def _can_cross(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | int | torch.SymInt)


def _nbytes(node: fx.Node) -> int:
    """Return the bytes of a value, with dynamic dimensions of size 1."""
    value: Any = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return 8
    return math.prod(size for size in value.shape if isinstance(size, int)) * value.element_size()


class RunningStage:
    """One stage of a program in its process. Messages go from each process to the next, and from the last to the first.

    A message holds the values of one part of a batch, or the error of a stage, which the later ones pass on.

    Args:
        module: of this process's stage.
        stages: all of them.
        device: of this process.
    """

    def __init__(self, module: fx.GraphModule, stages: Sequence[Stage], device: str):
        rank, count = dist.get_rank(), dist.get_world_size()
        self._module = module
        self._device = device
        self._next, self._previous = (rank + 1) % count, (rank - 1) % count
        self._incoming = [_form(node) for node in stages[rank].incoming]
        self._outgoing = [_form(node) for node in stages[rank].outgoing]
        self._results = [_form(node) for node in stages[-1].outgoing]
        self._sent: list[Send] = []

    def lead(self, parts: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Run parts of a batch, in the first process; return the outputs of each.

        Raises:
            IngotError: that of the first part which failed.
            OutOfStep: a process has ended.
        """
        sent = [send for part in parts for send in self._send(self._computed(part))]
        received = [self._receive(self._results) for _ in parts]
        with in_step():
            for work, _ in sent:
                work.wait()
        for outputs in received:
            if isinstance(outputs, IngotError):
                raise outputs
        return received  # type: ignore[return-value]

    def follow(self) -> None:
        """Run one part of a batch, in another process than the first.

        Raises:
            OutOfStep: a process has ended.
        """
        received = self._receive(self._incoming)
        outputs = received if isinstance(received, IngotError) else self._computed(received)
        with in_step():
            for work, _ in self._sent:
                work.wait()
        self._sent = self._send(outputs)

    def _computed(self, values: Sequence[Value]) -> Sequence[Value] | IngotError:
        outputs: Sequence[Value] | Exception = foreign.outcome(lambda: self._module(*values))
        return run_error(outputs) if isinstance(outputs, Exception) else outputs

    def _send(self, values: Sequence[Value] | IngotError) -> list[Send]:
        if isinstance(values, IngotError):
            text = torch.frombuffer(bytearray(encode_error(values)), dtype=torch.uint8)
            messages = [sizes_of((), self._outgoing, text.numel()), text]
        else:
            messages = [sizes_of(values, self._outgoing), *contents(values)]
        with in_step():
            works = [(dist.isend(message, self._next), message) for message in messages]
        return [(work, message) for work, message in works if work is not None]

    def _receive(self, forms: Sequence[Form]) -> list[Value] | IngotError:
        with in_step():
            dist.recv(sizes := no_sizes(forms), self._previous)
            if failed := int(sizes[0]):
                dist.recv(text := torch.empty(failed, dtype=torch.uint8), self._previous)
                return decode_error(memoryview(bytes(text.tolist())))
            values = room_for(sizes, forms, self._device)
            for content in contents(values):
                dist.recv(content, self._previous)
            return values


def _form(node: fx.Node) -> Form:
    value: Any = node.meta["val"]
    return (value.dim(), value.dtype) if isinstance(value, torch.Tensor) else None
