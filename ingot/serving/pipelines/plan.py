"""What a pipeline does with its models: what each node reads and runs for, checked by types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ingot.config.given import nearest
from ingot.config.pipelines import STEP_INPUTS, STEP_OUTPUT, Condition, Node, PipelineConfig, Ref, Refs
from ingot.errors import IngotError, InvalidConfig
from ingot.runtime import Model
from ingot.steps import Steps
from ingot.tensors import DType, Range, Signature, TensorSpec, parse_spec

Find = Callable[[str, str], Model]
"""Returns a model by its name and version; raises NotFound."""
Path = tuple[str, ...]
"""A level: the nodes with ``each`` that it is inside of, from the outermost; empty for the rows of the request."""

ROWS = "rows"
"""The dimension of the rows of a request."""


@dataclass(frozen=True, kw_only=True)
class PlannedNode:
    """A node with what it runs.

    Attributes:
        name: in its pipeline.
        node: as it is declared.
        level: of its items.
        needs: the nodes that must end before.
        model: None for a step.
        steps: of the model, if it gets raw inputs.
        outputs: what it returns.
    """

    name: str
    node: Node
    level: Path
    needs: frozenset[str]
    model: Model | None
    steps: Steps | None
    outputs: tuple[TensorSpec, ...]

    @property
    def address(self) -> tuple[str, str]:
        """The name and the version of its model."""
        return self.node.address

    @cached_property
    def columns(self) -> frozenset[Ref]:
        """The values of which an item gets one column."""
        return frozenset(ref for ref in self.node.reads if self.node.expands(ref))

    @cached_property
    def plain(self) -> Mapping[str, Ref] | None:
        """The value of each input, if the node has neither items, conditions nor alternatives; None otherwise."""
        sources = self.node.sources
        if self.level or self.node.conditions or any(len(refs) > 1 for refs in sources.values()):
            return None
        return {name: refs[0] for name, refs in sources.items()}

    @cached_property
    def separate(self) -> bool:
        """Whether each item is one request: files that are prepared differ in size, and some models have no batch."""
        if self.model is None:
            return False
        return bool(self.level) if self.steps is not None else self.model.signature.batch is None


@dataclass(frozen=True)
class Plan:
    """A pipeline that fits its models.

    Attributes:
        nodes: each behind those that it needs.
        levels: of all values that nodes and requests make.
        signature: of the pipeline. Its batch is not one that the scheduler joins.
        outputs: the values that each output reads.
    """

    nodes: tuple[PlannedNode, ...]
    levels: Mapping[str, Path]
    signature: Signature
    outputs: Mapping[str, Refs]


def planned(config: PipelineConfig, find: Find) -> Plan:
    """Return the plan of a pipeline.

    Args:
        config: checked by itself.
        find: returns a loaded model.

    Raises:
        InvalidConfig: a model is missing, or a value does not fit what reads it.
    """
    planner = _Planner(config, find)
    nodes = tuple(planner.node(name) for name in config.table.order)
    inputs = tuple(planner.given(name) for name in config.table.inputs)
    outputs = tuple(planner.output(name, refs) for name, refs in config.table.results.items())
    signature = Signature(inputs, outputs, ranges=planner.ranges)
    return Plan(nodes, {node.name: node.level for node in nodes} | {"": ()}, signature, config.table.results)


@dataclass
class _Planner:
    """Walks the nodes in their order, and keeps what is known of values."""

    config: PipelineConfig
    find: Find
    known: dict[Ref, TensorSpec] = field(default_factory=dict)
    levels: dict[str, Path] = field(default_factory=lambda: {"": ()})
    ranges: dict[str, Range] = field(default_factory=dict)

    def node(self, name: str) -> PlannedNode:
        """Return a node; all that it reads is known."""
        node = self.config.table.nodes[name]
        model, specs, outputs = self._interface(name, node)
        for key, refs in node.sources.items():
            for ref in refs:
                self._read(name, f"input '{key}'", ref, specs[key], expanded=node.expands(ref))
        for condition in node.conditions:
            ref = condition.ref
            self._read(name, "when", ref, _compared(condition), expanded=node.expands(ref), compared=True)
        if node.count:
            self._count(name, Ref.parse(node.count))
        level = self.levels[name] = self._level(name, node)
        self.known |= {Ref(name, spec.name): spec for spec in outputs}
        needs = frozenset(ref.node for ref in node.reads if ref.node)
        steps = None if model is None else model.steps_for(node.inputs)
        return PlannedNode(
            name=name,
            node=node,
            level=level,
            needs=needs,
            model=model,
            steps=steps,
            outputs=outputs,
        )

    def given(self, name: str) -> TensorSpec:
        """Return an input of the pipeline as its readers have it."""
        spec = self.known[Ref("", name)]
        return TensorSpec(name, spec.dtype, (ROWS, *_named(name, spec.shape[1:])), spec.values)

    def output(self, name: str, refs: Refs) -> TensorSpec:
        """Return an output of the pipeline, with a dimension for the items of each level."""
        specs = [self._made("", f"output '{name}'", ref) for ref in refs]
        first = specs[0]
        for ref, spec in zip(refs, specs, strict=True):
            if self.levels[ref.node] != self.levels[refs[0].node] or spec.dtype is not first.dtype:
                raise self._fault(
                    "",
                    f"output '{name}' cannot be either '{refs[0]}' or '{ref}': they differ in type "
                    "or in the items that they have",
                )
        columns = self.levels[refs[0].node]
        return TensorSpec(name, first.dtype, (ROWS, *columns, *_named(name, first.shape[1:], len(columns))))

    def _interface(self, name: str, node: Node) -> tuple[Model | None, dict[str, TensorSpec], tuple[TensorSpec, ...]]:
        """Return the model of a node, and what it reads and returns."""
        if node.step:
            texts = STEP_INPUTS[node.step] or dict.fromkeys(node.inputs, "bytes[items]")
            specs = {key: parse_spec(f"{key}:{text}")[0] for key, text in texts.items()}
            return None, specs, (TensorSpec(STEP_OUTPUT[node.step], DType.BYTES, ("items",)),)
        try:
            model = self.find(*node.address)
            signature = model.signature
        except IngotError as error:
            raise self._fault(name, f"cannot use model '{node.model}': {error}") from error
        if model.sequential or model.decoupled:
            raise self._fault(name, f"cannot use model '{node.model}': it answers sequences, or several times")
        steps = model.steps_for(node.inputs)
        specs = {spec.name: spec for spec in (signature.inputs if steps is None else steps.inputs)}
        optional = () if steps is None else steps.optional
        for key in node.inputs:
            if key not in specs:
                meant = nearest(key, specs)
                remedy = f"did you mean '{meant}'?" if meant else f"there are: {', '.join(specs)}"
                raise self._fault(name, f"sets input '{key}' of model '{node.model}', which has none; {remedy}")
        for key in specs:
            if key not in node.inputs and key not in optional:
                raise self._fault(name, f"lacks the input '{key}' of model '{node.model}'; add it to its inputs")
        outputs = signature.outputs if steps is None else steps.outputs
        if steps is None:
            for spec in (*signature.inputs, *outputs):
                self._check_rows(name, node.model, spec, signature)
        return model, specs, outputs

    def _check_rows(self, name: str, model: str, spec: TensorSpec, signature: Signature) -> None:
        """Check that the first dimension of a tensor has the items, so that they can be joined and separated."""
        first = spec.shape[0] if spec.shape else None
        if first != signature.batch if signature.batch is not None else isinstance(first, int) and first != 1:
            raise self._fault(name, f"cannot use model '{model}': the first dimension of '{spec}' is not its batch")

    def _read(
        self, name: str, what: str, ref: Ref, spec: TensorSpec, *, expanded: bool = False, compared: bool = False
    ) -> None:
        """Check that a value fits what reads it; the type of an input of the pipeline is that of its first reader."""
        if not ref.node and ref not in self.known:
            columns = (f"{ref.name}_1",) if expanded else ()
            self.ranges |= dict.fromkeys(columns, Range(0))
            self.known[ref] = replace(spec, name=ref.name, shape=(ROWS, *columns, *spec.shape[1:]))
        found = self._made(name, what, ref)
        shape = found.shape[2:] if expanded else found.shape[1:]
        if expanded and len(found.shape) < 2:
            raise self._fault(name, f"{what} needs one column of '{ref}' for each item, but it is {found}")
        fits = found.dtype is spec.dtype or (compared and DType.BYTES not in (found.dtype, spec.dtype))
        if not compared:
            sizes = zip(shape, spec.shape[1:], strict=False)
            fits &= len(shape) == len(spec.shape) - 1
            fits &= all(mine == theirs for mine, theirs in sizes if isinstance(mine, int) and isinstance(theirs, int))
        if not fits:
            wanted = f"{spec.dtype.torch_name}" if compared else str(spec)
            raise self._fault(name, f"{what} is {wanted}, but '{ref}' is {found}")

    def _made(self, name: str, what: str, ref: Ref) -> TensorSpec:
        """Return the specification of a value."""
        if ref in self.known:
            return self.known[ref]
        listed = ", ".join(each.name for each in self.known if each.node == ref.node)
        raise self._fault(
            name,
            f"{what} reads '{ref}', but node '{ref.node}' has no output '{ref.name}'; it has: {listed}",
        )

    def _level(self, name: str, node: Node) -> Path:
        """Return the level of a node's items: inside that of its columns, or the innermost of what it reads."""
        levels = {ref: self.levels[ref.node] for ref in node.reads}
        outer = max((self.levels[ref.node] for each in node.columns for ref in node.sources[each]), key=len, default=())
        innermost = (*outer, name) if node.columns else max(levels.values(), key=len)
        for ref, level in levels.items():
            if level != innermost[: len(level)]:
                raise self._fault(
                    name,
                    f"reads '{ref}', which has one value for each item of node '{level[-1]}', next to values of other "
                    "items; read values of one node, or of nodes outside of it",
                )
        return innermost

    def _count(self, name: str, ref: Ref) -> None:
        """Check the value that counts columns; an input that nothing else reads is int32."""
        if not ref.node and ref not in self.known:
            self.known[ref] = TensorSpec(ref.name, DType.INT32, (ROWS,))
        spec = self._made(name, "count", ref)
        if len(spec.shape) != 1 or spec.dtype not in (DType.INT32, DType.INT64):
            raise self._fault(name, f"count is '{ref}', which is {spec}; name one integer for each row")

    def _fault(self, name: str, text: str) -> InvalidConfig:
        place = self.config.node_places.get(name, self.config.place)
        node = f" node '{name}'" if name else ""
        return InvalidConfig([f"{place}: pipeline '{self.config.name}':{node} {text}".removeprefix(": ")])


def _compared(condition: Condition) -> TensorSpec:
    """Return the type of a condition's operand, which an input gets that only conditions read."""
    value = condition.equals
    dtype = DType.BYTES if isinstance(value, str) else DType.BOOL if isinstance(value, bool) else DType.FP32
    return TensorSpec("when", dtype, (ROWS,))


def _named(name: str, shape: Sequence[int | str], before: int = 0) -> Iterator[int | str]:
    """Yield a shape with another name for each dynamic dimension, as equal names would mean equal sizes."""
    for axis, size in enumerate(shape, 1 + before):
        yield size if isinstance(size, int) else f"{name}_{axis}"
