"""The walk over a graph: bounds of every tensor, the memory in use at once, and reasons where there are no bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from ingot.bounds.abstract import BOOL, INT64, Tensor, Text, UnboundedError
from ingot.bounds.flow import Flow, Kind
from ingot.bounds.graph import Attribute, Graph, Model, Node
from ingot.bounds.interval import Interval
from ingot.bounds.memory import depth_first, peak_of
from ingot.bounds.operators import RULES, Op, Rule
from ingot.bounds.operators.op import refuse_empty
from ingot.bounds.operators.texts import with_texts
from ingot.bounds.poly import ONE, ZERO, Poly, TooComplexError
from ingot.report.text import one_line

MAX_VISITS = 100_000
"""Nodes that are analysed, with those of functions and loops once for each use."""
MAX_TRIPS = 1 << 20
"""Repetitions of loops within loops that do not depend on the sizes of the inputs."""
# Graphs and functions inside each other.
_MAX_DEPTH = 32
# Loops inside each other whose repetitions depend on the sizes of the inputs.
_MAX_NESTED = 2
_MOST_REASONS = 8
# Characters of a reason.
_LONGEST_REASON = 400
# The domains of standard operators, which a function of the file must not replace.
_BUILT_IN = ("ai.onnx", "com.microsoft", "com.ms.", "org.pytorch.aten")
_BRANCHES = {True: "then_branch", False: "else_branch"}
CONTROL = {"If": "_if", "Loop": "_loop", "Scan": "_scan"}
"""The methods of :class:`Analysis` that are the rules of operators with inner graphs."""

_Run = Callable[[Graph, Sequence[Tensor], Poly], tuple[list[Tensor], Poly]]
"""Returns the outputs of an inner graph for its inputs and its number of repetitions, and its bytes in use at once."""


class StoppedError(Exception):
    """The graph is too large or too deeply nested; the text says which."""


@dataclass
class Scope:
    """The tensors and nodes that are visible in a graph; inner graphs also see those of the outer ones.

    Attributes:
        tensors: the bounds of each tensor that exists already; None if nothing is known of it.
        makers: the node that makes each tensor.
        attributes: those of the call, for the nodes of a function.
        outer: the scope around this one; None for a model's graph and for functions.
        later: the outputs of nodes that are not analysed yet.
        flows: how tensors depend on samples, in an analysis that follows them.
    """

    tensors: dict[str, Tensor | None]
    makers: dict[str, Node] = field(default_factory=dict)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    outer: Scope | None = None
    later: set[str] = field(default_factory=set)
    flows: dict[str, Flow] = field(default_factory=dict)

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, or None if nothing is known of it.

        Raises:
            UnboundedError: there is none.
        """
        for scope in self._outwards():
            if name in scope.tensors:
                return scope.tensors[name]
            if name in scope.later:  # an engine sorts the nodes; another tensor of an outer graph may have this name
                raise UnboundedError(f"its input '{name}' is made by a later node")
        raise UnboundedError(f"its input '{name}' does not exist")

    def flow(self, name: str) -> Flow:
        """Return how a tensor depends on samples."""
        for scope in self._outwards():
            if name in scope.flows:
                return scope.flows[name]
        return Flow(Kind.MIXED, reason=f"the graph: tensor '{name}' does not exist")

    def maker(self, name: str) -> Node | None:
        """Return the node that makes a tensor; None for an input, a constant or a tensor that does not exist."""
        for scope in self._outwards():
            if name in scope.makers or name in scope.tensors:
                return scope.makers.get(name)
        return None

    def _outwards(self) -> Iterator[Scope]:
        """Yield this scope and those around it, the innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


class Analysis:
    """Bounds of one model.

    Args:
        model: the model's graph and functions.

    Attributes:
        reasons: why the graph is not bounded, each with its node; empty if it is.
    """

    def __init__(self, model: Model):
        self.reasons: list[str] = []
        self._model = model
        self._opset = model.opset
        self._visits = 0
        self._depth = 0
        self._trips = ONE

    def analyse(self, graph: Graph, scope: Scope) -> tuple[list[Tensor | None], Poly]:
        """Return the bounds of a graph's outputs, and of the bytes that its nodes have in use at once.

        Raises:
            StoppedError: it is too large or too deeply nested.
        """
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                raise StoppedError(f"its graphs and functions are nested more than {_MAX_DEPTH} deep")
            return self._graph(graph, scope)
        finally:
            self._depth -= 1

    def _graph(self, graph: Graph, scope: Scope) -> tuple[list[Tensor | None], Poly]:
        for name, constant in graph.constants.items():
            scope.tensors.setdefault(name, Tensor.constant(constant))
        made = [name for node in graph.nodes for name in node.outputs if name]
        scope.later = set(made)
        if len(scope.later) < len(made) or any(name in scope.tensors for name in made):
            raise StoppedError("it defines a tensor twice")
        needs, spaces = list[dict[str, Poly]](), list[Poly]()
        for node in graph.nodes:
            outputs, workspace = self._node(node, scope)
            need = {}
            for name, tensor in zip(node.outputs, outputs, strict=False):
                scope.tensors[name] = tensor
                scope.makers[name] = node
                scope.later.discard(name)
                if tensor is not None and node.operator != "Constant":
                    need[name] = tensor.nbytes
            needs.append(need)
            spaces.append(workspace)
        uses = [_uses(node) for node in graph.nodes]
        # ONNX Runtime runs the nodes depth first, other engines in the order of the file.
        orders = [range(len(uses)), depth_first(graph, uses)]
        peak = reduce(Poly.upper, (peak_of(graph, uses, needs, spaces, order) for order in orders))
        return [self._found(scope, name) for name in graph.outputs], peak

    def _found(self, scope: Scope, name: str) -> Tensor | None:
        try:
            return scope.find(name)
        except UnboundedError as error:
            self._add(f"the graph: {error}".replace("its input", "its output"))
            return None

    def _node(self, node: Node, scope: Scope) -> tuple[list[Tensor | None], Poly]:
        """Return the bounds of a node's outputs, None if unknown, and of its workspace."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise StoppedError(f"it has more than {MAX_VISITS} nodes, with those of its functions for each call")
        node = resolved(node, scope)
        try:
            inputs = [scope.find(name) if name else None for name in node.inputs]
            if any(tensor is None and name for tensor, name in zip(inputs, node.inputs, strict=True)):
                return [None] * len(node.outputs), ZERO  # the reason is known
            op = Op(node, inputs, self._opset, scope.maker, finder(scope), self._runner(node, scope))
            outputs = with_texts(op, self._rule(node)(op))
            return [*outputs, *[None] * (len(node.outputs) - len(outputs))], op.workspace
        except UnboundedError as error:
            self._add(f"{node}: {error}")
        except TooComplexError:
            self._add(f"{node}: the bounds of its sizes are too complex")
        except (ArithmeticError, LookupError, TypeError, ValueError):  # an invalid node, which engines refuse
            self._add(f"{node}: its inputs or attributes do not fit the operator")
        return [None] * len(node.outputs), ZERO

    def _rule(self, node: Node) -> Rule:
        key = (node.domain, node.operator)
        function = self._model.functions.get(key)
        if function is not None and (not node.domain or node.domain.startswith(_BUILT_IN)):
            raise UnboundedError("the file replaces a standard operator by a function")
        if function is not None:
            return lambda op: self._function(function, op)
        if not node.domain and node.operator in CONTROL:
            return getattr(self, CONTROL[node.operator])  # type: ignore[no-any-return]
        if key not in RULES:
            kind = "operator" if node.domain in ("", "ai.onnx.ml", "com.microsoft") else "custom operator"
            raise UnboundedError(f"no bounds are known for this {kind}")
        return RULES[key]

    def _add(self, reason: str) -> None:
        reason = one_line(reason, _LONGEST_REASON)
        if reason not in self.reasons and len(self.reasons) < _MOST_REASONS:
            self.reasons.append(reason)

    def _runner(self, node: Node, scope: Scope) -> _Run:
        """Return a function that analyses the inner graphs of a node."""

        def run(graph: Graph, inputs: Sequence[Tensor], trips: Poly) -> tuple[list[Tensor], Poly]:
            if trips != ONE and not graph.nodes:
                raise UnboundedError("its graph has no nodes, between which the engine could end a call")
            inner = Scope(dict(zip(graph.inputs, inputs, strict=False)), attributes=scope.attributes, outer=scope)
            before, self._trips = self._trips, self._trips * trips
            try:
                self._check_trips()
                outputs, peak = self.analyse(graph, inner)
            finally:
                self._trips = before
            return _all_known(outputs, "its inner graph"), peak

        return run

    def _check_trips(self) -> None:
        if sum(factor for factor in self._trips.terms.values() if factor > 0) > MAX_TRIPS:
            raise UnboundedError(f"it may run its graph more than {MAX_TRIPS:,} times")
        if self._trips.degree > _MAX_NESTED:
            raise UnboundedError(f"more than {_MAX_NESTED} loops within each other follow the sizes of inputs")

    def _function(self, function: Graph, op: Op) -> list[Tensor]:
        tensors: dict[str, Tensor | None] = dict.fromkeys(function.inputs)
        tensors |= dict(zip(function.inputs, op.inputs, strict=False))
        before, self._opset = self._opset, function.opset or self._opset
        scope = Scope(tensors, attributes={**function.defaults, **op.node.attributes})
        try:
            outputs, op.workspace = self.analyse(function, scope)
        finally:
            self._opset = before
        return _all_known(outputs, "its function")

    def _if(self, op: Op) -> list[Tensor]:
        condition = op[0].scalar.constant
        found = []
        for name in ("then_branch", "else_branch") if condition is None else (_BRANCHES[bool(condition)],):
            branch = op.node.graph(name)
            if branch is None:
                raise UnboundedError("it lacks a branch")
            outputs, peak = op.run(branch, (), ONE)
            op.workspace = op.workspace.upper(peak)
            found.append(outputs)
        return [_joined(one, two) for one, two in zip(found[0], found[-1], strict=True)]

    def _loop(self, op: Op) -> list[Tensor]:
        body = op.node.graph("body")
        trips = op[0].scalar if op.get(0) is not None else Interval()
        if body is None or trips.high is None:
            raise UnboundedError(
                "its number of repetitions comes from values; declare their range: --input 'NAME:int64[]=0..100'"
            )
        states = [_carried(op[index]) for index in range(2, len(op.inputs))]
        number = Tensor.of(INT64, [], items=[Interval.up_to(trips.high)])
        inputs = [number, Tensor.of(BOOL, []), *states]
        outputs, op.workspace = op.run(body, inputs, trips.high)
        found = self._repeated(op, states, outputs[1:], trips.high, [0] * len(outputs))
        if trips.positive and (op.get(1) is None or op[1].scalar.constant == 1):
            return found
        # If the body may not run at all, the engine decides the shapes of scanned outputs.
        return [
            tensor if place < len(states) else replace(tensor, dims=None, items=None)
            for place, tensor in enumerate(found)
        ]

    def _scan(self, op: Op) -> list[Tensor]:
        body = op.node.graph("body")
        count = op.integer("num_scan_inputs")
        if body is None or not 0 < count <= len(op.inputs):
            raise UnboundedError("it lacks a body")
        if op.opset < 9:
            raise UnboundedError("this old form of the operator is not analysed")
        states = [_carried(tensor) for tensor in op.given[:-count]]
        axes = op.integers("scan_input_axes", [0] * count)
        trips, slices = ZERO, []
        for tensor, axis in zip(op.given[-count:], axes, strict=True):
            dims = list(tensor.shape())
            trips = dims.pop(axis).high or ZERO
            slices.append(Tensor.of(tensor.kind, dims, text=tensor.text))
        outputs, op.workspace = op.run(body, [*states, *slices], trips)
        scanned = len(outputs) - len(states)
        out_axes = op.integers("scan_output_axes", [0] * scanned)
        # The engine transposes what is not scanned along the first axis; empty tensors then end the process.
        for tensor, axis in (
            *zip(op.given[-count:], axes, strict=True),
            *zip(outputs[len(states) :], out_axes, strict=True),
        ):
            if axis != 0:
                refuse_empty(tensor.shape())
        return self._repeated(op, states, outputs, trips, out_axes)

    @staticmethod
    def _repeated(
        op: Op, states: Sequence[Tensor], outputs: Sequence[Tensor], trips: Poly, axes: Sequence[int]
    ) -> list[Tensor]:
        """Return the outputs of a loop: its states, whose shapes must not change, and the scanned outputs, stacked."""
        found = []
        for state, output in zip(states, outputs, strict=False):
            if state.dims != output.dims or (state.dims is None and not state.count.covers(output.count)):
                raise UnboundedError("the shape of a tensor that it carries changes from one repetition to the next")
            if output.text is not None and (state.text is None or not state.text.covers(output.text)):
                raise UnboundedError("the texts that it carries may become longer with each repetition")
            found.append(state)
        for output, axis in zip(outputs[len(states) :], axes, strict=False):
            op.workspace = op.workspace + output.nbytes * trips  # the engine keeps the parts until it joins them
            dims = list(output.shape())
            dims.insert(axis % (len(dims) + 1), Interval.up_to(trips))
            text = None if output.text is None else Text(output.text.sent * trips, output.text.width)
            found.append(Tensor.of(output.kind, dims, count=output.count * trips, text=text))
        return found


def _all_known(tensors: Sequence[Tensor | None], what: str) -> list[Tensor]:
    """Return the outputs of a graph; raise UnboundedError, with its name ``what``, if one is not bounded."""
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors):
        raise UnboundedError(f"{what} is not bounded")
    return known


def _carried(tensor: Tensor) -> Tensor:
    """Return a tensor that a loop carries, as far as it is the same after any number of repetitions."""
    known = tensor.forgotten()
    return known if known.dims is None else Tensor.of(known.kind, known.dims, text=known.text)


def _joined(one: Tensor, two: Tensor) -> Tensor:
    """Return the bounds of a tensor that is either of two."""
    count = one.count.upper(two.count)
    kind = one.kind if one.kind == two.kind else 0
    text = one.text if two.text is None else two.text if one.text is None else one.text.upper(two.text)
    if one.dims is None or two.dims is None or len(one.dims) != len(two.dims):
        return Tensor(kind, None, count, text=text)
    dims = tuple(first.joined(second) for first, second in zip(one.dims, two.dims, strict=True))
    return Tensor.of(kind, dims, count=count, each=one.bounds.joined(two.bounds), text=text)


def _uses(node: Node) -> set[str]:
    """Return the tensors that a node and its inner graphs read."""
    found = set(node.inputs)
    for graph in node.graphs:
        found.update(graph.outputs, *map(_uses, graph.nodes))
    return found


def resolved(node: Node, scope: Scope) -> Node:
    """Return a node of a function with the attributes that refer to its caller's replaced by those."""
    if not any(attribute.reference for attribute in node.attributes.values()):
        return node
    found = {}
    for name, item in node.attributes.items():
        actual = scope.attributes.get(item.reference) if item.reference else item
        if actual is not None:
            found[name] = actual
    return replace(node, attributes=found)


def finder(scope: Scope) -> Callable[[str], Tensor | None]:
    """Return a function that finds a tensor that is visible in a scope."""

    def find(name: str) -> Tensor | None:
        return scope.find(name) if name else None

    return find
