"""The walk over a graph that follows the samples of a batch, next to the bounds of sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial, reduce

from ingot.bounds.abstract import Tensor, UnboundedError
from ingot.bounds.analysis import CONTROL, Analysis, Scope, finder, resolved
from ingot.bounds.flow import COUNTED, SHARED, Flow, Kind, MixingError
from ingot.bounds.graph import Graph, Model, Node
from ingot.bounds.operators import Op
from ingot.bounds.poly import Poly, TooComplexError
from ingot.bounds.samples.rules import MAKERS, RULES
from ingot.bounds.samples.selecting import uncounted
from ingot.bounds.samples.step import Step

# Most times a loop's body is followed until the flows of what it carries stay the same.
_MOST_ROUNDS = 4
_Run = Callable[[Graph, Sequence[Tensor], Poly], tuple[list[Tensor], Poly]]


class Tracing(Analysis):
    """An analysis that also finds the :class:`Flow` of each tensor.

    Args:
        model: the graph.
        dim: the dimension of samples.
    """

    def __init__(self, model: Model, dim: str):
        super().__init__(model)
        self._dim = dim
        self._entering: Sequence[Flow] = ()  # of the inputs of the next inner graph
        self._runs: list[list[Flow]] = []  # of the outputs of the inner graphs of the node
        self._made: list[Flow] | None = None  # of the outputs of the node, if it has inner graphs
        self._given: Sequence[Flow | None] = ()  # of the inputs of the node

    def analyse(self, graph: Graph, scope: Scope) -> tuple[list[Tensor | None], Poly]:
        scope.flows |= dict.fromkeys(graph.constants, SHARED)
        scope.flows |= dict(zip(graph.inputs, self._entering, strict=False))
        self._entering = ()
        found = super().analyse(graph, scope)
        self._runs.append([scope.flow(name) for name in graph.outputs])
        return found

    def _node(self, node: Node, scope: Scope) -> tuple[list[Tensor | None], Poly]:
        flows = [scope.flow(name) if name else None for name in node.inputs]
        before = len(self._runs)
        self._given, self._made = flows, None
        outputs, workspace = super()._node(node, scope)
        made, self._made = self._made, None
        del self._runs[before:]
        if made is None:
            made = self._derived(resolved(node, scope), scope, flows, outputs)
        for name, flow in zip(node.outputs, made, strict=False):
            scope.flows[name] = flow
        return outputs, workspace

    def _derived(
        self, node: Node, scope: Scope, flows: Sequence[Flow | None], outputs: Sequence[Tensor | None]
    ) -> list[Flow]:
        """Return the flows of the outputs of a node without inner graphs."""
        try:
            tensors = [_known(scope, name) for name in node.inputs]
            op = Op(node, tensors, self._opset, scope.maker, finder(scope), self._runner(node, scope))
            found = self._followed(Step(op, flows, outputs, self._dim))
            return [self._checked(flow, tensor) for flow, tensor in zip(found, outputs, strict=False)]
        except (MixingError, UnboundedError) as error:
            reason = str(error)
        except (ArithmeticError, LookupError, TooComplexError, TypeError, ValueError):
            reason = "its samples cannot be followed"
        mixed = Flow(Kind.MIXED, reason=f"{node}: {reason}", node=next(iter(node.outputs), ""))
        return [mixed] * len(node.outputs)

    def _followed(self, step: Step) -> list[Flow]:
        node = step.op.node
        key, count = (node.domain, node.operator), len(node.outputs)
        given = [flow for flow in step.flows if flow is not None]
        kinds = {flow.kind for flow in given}
        maker = not node.domain and node.operator in MAKERS
        if Kind.MIXED in kinds and not (maker and node.operator in ("Shape", "Size")):
            return [next(flow for flow in given if flow.kind is Kind.MIXED)] * count
        if not kinds - {Kind.SHARED} and not (maker or node.graphs):
            return [SHARED] * count
        if not kinds - {Kind.SHARED, Kind.COUNTED} and not maker:
            return [self._sized(step, tensor) for tensor in step.outputs]
        if not node.domain and node.operator in CONTROL:
            raise MixingError(
                next((text for text in map(partial(_after, f"{node}: "), self.reasons) if text), "unknown")
            )
        if key not in RULES:
            known = node.domain in ("", "ai.onnx.ml", "com.microsoft")
            raise MixingError(f"whether this {'' if known else 'custom '}operator combines samples is not known")
        found = RULES[key](step)
        return found if isinstance(found, list) else [found] * count

    def _sized(self, step: Step, tensor: Tensor | None) -> Flow:
        """Return the flow of a result of sizes, which may no longer depend on the number of samples."""
        if tensor is None or tensor.dims is None or any(step.counts(dim.exact) for dim in tensor.dims):
            raise MixingError("the size of its output depends on the number of samples")
        fixed = tensor.items is not None and not any(step.counts(item.exact) for item in tensor.items)
        return SHARED if fixed or uncounted(step) else COUNTED

    def _checked(self, flow: Flow, tensor: Tensor | None) -> Flow:
        if flow.sampled and tensor is not None and tensor.dims is not None:
            exact = tensor.dims[flow.axis].exact
            if len(tensor.dims) != flow.rank or (exact is not None and exact != flow.size):
                raise MixingError("its samples cannot be followed")
        return flow

    def _runner(self, node: Node, scope: Scope) -> _Run:
        run = super()._runner(node, scope)

        def followed(graph: Graph, inputs: Sequence[Tensor], trips: Poly) -> tuple[list[Tensor], Poly]:
            before = len(self._runs)
            found = run(graph, inputs, trips)
            del self._runs[before:-1]
            return found

        return followed

    def _function(self, function: Graph, op: Op) -> list[Tensor]:
        self._entering = [SHARED if flow is None else flow for flow in self._given]
        before = len(self._runs)
        found = super()._function(function, op)
        self._made = self._runs[-1]
        del self._runs[before:]
        return found

    def _if(self, op: Op) -> list[Tensor]:
        condition, before = self._given[0], len(self._runs)
        found = super()._if(op)
        runs = self._runs[before:]
        if len(runs) > 1 and condition != SHARED:
            counted = condition is not None and condition.counted
            why = "the number of samples decides" if counted else "its condition depends on samples"
            reason = f"which of its branches runs is one choice for all samples, and {why}"
            self._made = self._mixed(op, reason, condition)
        else:
            self._made = [reduce(Flow.joined, flows) for flows in zip(*runs, strict=True)]
        return found

    def _loop(self, op: Op) -> list[Tensor]:
        flows = [SHARED if flow is None else flow for flow in self._given]
        return self._repeat(op, flows[:2], [SHARED, SHARED], flows[2:], [], super()._loop)

    def _scan(self, op: Op) -> list[Tensor]:
        count = op.integer("num_scan_inputs")
        flows = [SHARED if flow is None else flow for flow in self._given]
        axes = op.integers("scan_input_axes", [0] * count)
        slices = []
        for flow, axis in zip(flows[-count:], axes, strict=True):
            if flow.sampled and flow.axis == axis % flow.rank:
                slices.append(Flow(Kind.MIXED, reason=f"{op.node}: it goes from sample to sample"))
            else:
                slices.append(
                    flow.moved(flow.axis - (axis % flow.rank < flow.axis), flow.rank - 1) if flow.sampled else flow
                )
        return self._repeat(op, [], [], flows[:-count], slices, super()._scan)

    def _repeat(
        self,
        op: Op,
        deciding: Sequence[Flow],
        counters: Sequence[Flow],
        states: Sequence[Flow],
        slices: Sequence[Flow],
        analysed: Callable[[Op], list[Tensor]],
    ) -> list[Tensor]:
        """Follow a loop until what it carries has the same flows before and after a repetition.

        Args:
            op: the loop.
            deciding: flows of inputs that decide how often it repeats.
            counters: of the body's inputs before those that it carries.
            states: of what it carries.
            slices: of the body's last inputs.
            analysed: finds the bounds.
        """
        loop = bool(counters)
        for _ in range(_MOST_ROUNDS):
            before = len(self._runs)
            self._entering = [*counters, *states, *slices]
            found = analysed(op)
            left = self._runs[-1]
            del self._runs[before:]
            carried = left[loop : loop + len(states)]
            joined = [_joined(op, one, two) for one, two in zip(states, carried, strict=True)]
            if joined == list(states):
                break
            states = joined
        else:
            states = self._mixed(op, "what it carries cannot be followed")[: len(states)]
        decided = [flow for flow in (*deciding, *left[: int(loop)]) if flow != SHARED]
        if decided:
            reason = "how often it repeats is one number for all samples, and depends on them"
            self._made = self._mixed(op, reason, *decided)
            return found
        ends = [0] * len(left) if loop else op.integers("scan_output_axes", [0] * len(left))
        scanned = [_stacked(flow, axis) for flow, axis in zip(left[loop + len(states) :], ends, strict=False)]
        self._made = [*states, *scanned]
        return found

    @staticmethod
    def _mixed(op: Op, reason: str, *causes: Flow | None) -> list[Flow]:
        """Return the flows of the outputs of a node; an earlier node that mixes samples is named instead of it."""
        outputs = op.node.outputs
        own = Flow(Kind.MIXED, reason=f"{op.node}: {reason}", node=next(iter(outputs), ""))
        return [next((flow for flow in causes if flow is not None and flow.kind is Kind.MIXED), own)] * len(outputs)


def _joined(op: Op, one: Flow, two: Flow) -> Flow:
    if one.kind is Kind.SHARED and two.sampled:
        return Flow(Kind.MIXED, reason=f"{op.node}: it carries samples where it began with a value that all share")
    return one.joined(two)


def _stacked(flow: Flow, axis: int) -> Flow:
    """Return the flow of results that are stacked along a new dimension."""
    if not flow.sampled:
        return flow
    place = axis % (flow.rank + 1)
    return flow.moved(flow.axis + (place <= flow.axis), flow.rank + 1)


def _known(scope: Scope, name: str) -> Tensor | None:
    with contextlib.suppress(UnboundedError):
        return scope.find(name) if name else None
    return None


def _after(start: str, text: str) -> str:
    return text.removeprefix(start) if text.startswith(start) else ""
