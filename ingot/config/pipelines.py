"""Pipelines of the configuration file: models and steps that read each other's outputs, under one name.

The checks here need no model: names, cycles, and values that nothing makes or reads. Types and shapes are checked when
the models are loaded, by :mod:`ingot.serving.pipelines.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ingot.config.given import nearest

STEP_INPUTS: Mapping[str, Mapping[str, str]] = {
    "crop": {"image": "bytes[items]", "box": "float32[items,4]", "polygon": "int32[items,4,2]"},
    "rotate": {"image": "bytes[items]"},
    "row": {},
}
"""The built-in steps between models with their inputs; ``row`` has any, of BYTES."""
STEP_OUTPUT = {"crop": "image", "rotate": "image", "row": "row"}
"""What each of them returns, in BYTES."""

_NAME = re.compile(r"[A-Za-z_][\w\-]*")


class Ref(NamedTuple):
    """A value of a pipeline: an output of a node, or, with an empty ``node``, an input of the pipeline."""

    node: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Return the value that ``NODE.OUTPUT`` or the name of an input refers to."""
        node, dot, name = text.partition(".")
        return cls(node, name) if dot else cls("", text)

    def __str__(self) -> str:
        return f"{self.node}.{self.name}" if self.node else self.name


Refs = tuple[Ref, ...]
"""Alternatives: of each item, the value of the first whose node ran."""
_Source = str | list[str]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Condition(_Table):
    """A comparison of a value of each item; of several values of an item, such as classes, the first counts."""

    value: Annotated[str, Field(description="The compared value: NODE.OUTPUT, or an input of the pipeline.")]
    equals: Annotated[str | bool | float | None, Field(description="The text or number that it must be.")] = None
    above: Annotated[float | None, Field(description="The number that it must exceed.")] = None
    below: Annotated[float | None, Field(description="The number that it must stay below.")] = None

    @property
    def ref(self) -> Ref:
        return Ref.parse(self.value)


# Chosen by the type of the value, so that a fault is reported for one of the two only.
_When = Annotated[
    Annotated[Condition, Tag("one")] | Annotated[list[Condition], Tag("all")],
    Discriminator(lambda value: "all" if isinstance(value, list) else "one"),
]


class Node(_Table):
    """A node of a pipeline."""

    model: Annotated[str, Field(description="A model of this server: NAME, or NAME:VERSION.")] = ""
    step: Annotated[Literal["", "crop", "rotate", "row"], Field(description="A built-in step instead of a model.")] = ""
    inputs: Annotated[
        dict[str, _Source],
        Field(
            min_length=1,
            description="What each input reads: NODE.OUTPUT, an input of the pipeline, or a list of alternatives.",
        ),
    ]
    each: Annotated[_Source, Field(description="The inputs of which each column becomes an item.")] = Field(
        default_factory=list
    )
    count: Annotated[str, Field(description="How many columns of a row are items: NODE.OUTPUT; by default all.")] = ""
    when: Annotated[_When, Field(description="Conditions of an item; the node runs where all hold.")] = Field(
        default_factory=list
    )
    degrees: Annotated[Literal[90, 180, 270], Field(description="How far rotate turns, clockwise.")] = 180

    @cached_property
    def address(self) -> tuple[str, str]:
        """The name and the version of its model."""
        name, _, version = self.model.partition(":")
        return name, version

    @cached_property
    def sources(self) -> Mapping[str, Refs]:
        """What each input reads."""
        return {name: _refs(source) for name, source in self.inputs.items()}

    @cached_property
    def conditions(self) -> Sequence[Condition]:
        return [self.when] if isinstance(self.when, Condition) else self.when

    @cached_property
    def reads(self) -> Mapping[Ref, str]:
        """All values that it reads, with the key that names each."""
        found = {ref: f"inputs.{name}" for name, refs in self.sources.items() for ref in refs}
        count = {Ref.parse(self.count): "count"} if self.count else {}
        return {**{condition.ref: "when" for condition in self.conditions}, **count, **found}

    @cached_property
    def columns(self) -> Sequence[str]:
        """The inputs of which each column becomes an item."""
        return [self.each] if isinstance(self.each, str) else self.each

    def expands(self, ref: Ref) -> bool:
        """Return whether an item gets one column of a value: of those inputs, and of others that their nodes make."""
        sources = {source for name in self.columns for source in self.sources.get(name, ())}
        return ref in sources or bool(ref.node and ref.node in {source.node for source in sources})


class Table(_Table):
    """A pipeline: models and steps that read each other's outputs, served as one model."""

    inputs: Annotated[list[str], Field(min_length=1, description="The names of its inputs.")]
    outputs: Annotated[
        dict[str, _Source],
        Field(min_length=1, description="Its outputs: the NODE.OUTPUT of each, or a list of alternatives."),
    ]
    nodes: Annotated[dict[str, Node], Field(min_length=1, max_length=64, description="Its nodes by name.")]
    goldens: Annotated[
        str, Field(description="A file of recorded requests that it must reproduce, relative to this file.")
    ] = ""

    @cached_property
    def results(self) -> Mapping[str, Refs]:
        """What each output is."""
        return {name: _refs(source) for name, source in self.outputs.items()}

    @property
    def order(self) -> list[str]:
        """The names of the nodes, each behind those that it reads."""
        return [*TopologicalSorter(_needs(self)).static_order()]


@dataclass(frozen=True)
class PipelineConfig:
    """A pipeline of the file.

    Attributes:
        name: for clients.
        table: what it is made of.
        goldens: the requests that it must reproduce before it is ready, as :mod:`ingot.model_store` encodes them.
        place: the file and line, for messages.
        node_places: the same of its nodes.
    """

    name: str
    table: Table
    goldens: bytes = b""
    place: str = field(default="", compare=False)
    node_places: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, name: str, table: Table, goldens: bytes, place: Callable[[Sequence[str]], str]) -> PipelineConfig:
        """Return a parsed pipeline; ``place`` returns the file and line of a path of keys."""
        at = ("pipelines", name)
        places = {node: place((*at, "nodes", node)) for node in table.nodes}
        return cls(name, table, goldens, place(at), places)


def problems(name: str, table: Table) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the faults of a pipeline that need no models: the path of the key, and the text."""
    at = ("pipelines", name)
    for given in table.inputs:
        if not _NAME.fullmatch(given) or table.inputs.count(given) > 1:
            yield (*at, "inputs"), f"input '{given}' must be a name without '.', and occur once"
    for node, each in table.nodes.items():
        for text in _node_problems(table, node, each):
            yield (*at, "nodes", node), f"node '{node}' {text}"
    for output, refs in table.results.items():
        for ref in refs:
            if fault := _unmade(table, ref):
                yield (*at, "outputs"), f"output '{output}' {fault}"
    yield from _structure(at, table)


def _structure(at: tuple[str, ...], table: Table) -> Iterator[tuple[tuple[str, ...], str]]:
    read = {ref for node in table.nodes.values() for ref in node.reads}
    read |= {ref for refs in table.results.values() for ref in refs}
    for given in table.inputs:
        if Ref("", given) not in read:
            yield (*at, "inputs"), f"no node reads input '{given}'; remove it, or name it in the inputs of a node"
    used = {ref.node for ref in read}
    for node in table.nodes:
        if node not in used:
            yield (*at, "nodes", node), f"nothing reads an output of node '{node}'; remove it, or add it to outputs"
    try:
        _ = table.order
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        yield (*at, "nodes", error.args[1][0]), f"the nodes wait for each other in a cycle: {cycle}; remove one input"


def _node_problems(table: Table, name: str, node: Node) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield "has a wrong name; write letters, digits, '_' and '-', from a letter"
    if bool(node.model) == bool(node.step):
        yield 'needs either a model or a step: model = "NAME", or step = "crop"'
    for ref, key in node.reads.items():
        if fault := _unmade(table, ref):
            yield f"{fault} ({key})"
    for column in node.columns:
        if column not in node.inputs:
            yield f"has '{column}' in each, which is not one of its inputs: {', '.join(node.inputs)}"
    if node.count and not node.columns:
        yield "has a count, but no each; name the inputs whose columns it counts"
    for condition in node.conditions:
        if condition.equals is condition.above is condition.below is None:
            yield f"compares '{condition.value}' with nothing; add equals, above or below to its when"
    if node.step:
        yield from _step_problems(node)


def _step_problems(node: Node) -> Iterator[str]:
    if node.step == "row":
        return
    known = STEP_INPUTS[node.step]
    if "image" not in node.inputs:
        yield f"runs step '{node.step}', which needs the input image"
    if unknown := sorted(node.inputs.keys() - known.keys()):
        yield f"has no input '{unknown[0]}'; step '{node.step}' reads: {', '.join(known)}"
    if node.step == "crop" and ("box" in node.inputs) == ("polygon" in node.inputs):
        yield "needs either the input box or polygon"


def _unmade(table: Table, ref: Ref) -> str:
    """Return why a value does not exist; empty if it may."""
    if not ref.node:
        meant = nearest(ref.name, table.inputs)
        remedy = f"did you mean '{meant}'?" if meant else "add it to inputs"
        return "" if ref.name in table.inputs else f"reads '{ref}', which is not an input of the pipeline; {remedy}"
    if ref.node in table.nodes:
        return ""
    meant = nearest(ref.node, table.nodes)
    remedy = f"did you mean '{meant}.{ref.name}'?" if meant else f"there are: {', '.join(table.nodes)}"
    return f"reads '{ref}', but there is no node '{ref.node}'; {remedy}"


def _needs(table: Table) -> dict[str, set[str]]:
    return {name: {ref.node for ref in node.reads if ref.node in table.nodes} for name, node in table.nodes.items()}


def _refs(source: _Source) -> Refs:
    return tuple(map(Ref.parse, [source] if isinstance(source, str) else source))
