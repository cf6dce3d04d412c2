"""What differs between two archives, as records: numbers and short texts, ready for JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Change(_Record):
    """A fact that differs; None: there is none on that side."""

    what: str
    before: str | None = None
    after: str | None = None


class Measure(_Record):
    """A measured number of both; None: it was not measured, or is no finite number."""

    what: str
    before: float | None = None
    after: float | None = None


class LatencyChange(_Record):
    """The median seconds of one engine call with that many rows; None: it was not measured."""

    rows: int
    before: float | None = None
    after: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speedup(self) -> float | None:
        """How many times as fast the second is."""
        return self.before / self.after if self.before and self.after else None


class GoldenChange(_Record):
    """How far an output is from the first archive's, over the golden cases that both were asked.

    ``difference`` is the largest absolute difference as a share of the output's largest value. None: it is no number,
    since types, shapes, NaNs, or values that are no floating-point numbers differ.
    """

    tensor: str
    difference: float | None


class OperatorChange(_Record):
    """How many nodes of one operator a graph has, where it is not the same number."""

    operator: str
    before: int
    after: int


class TensorInfo(_Record):
    """A tensor of a graph; ``size`` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Values(_Record):
    """How the values of a tensor differ from those of another of the same type and shape.

    ``relative`` is ||after - before|| / ||before||, ``largest`` the largest absolute difference; both over the elements
    that are finite on both sides, in double precision. None: there is no such number, since the tensor was all zeros,
    holds text, or its squares are beyond any float. ``count`` is the number of elements that differ, and ``odd`` that
    of them which are NaN or infinite on either side.
    """

    relative: float | None = None
    largest: float | None = None
    count: int
    odd: int = 0


class TensorChange(_Record):
    """A tensor that is in both graphs under one name, but not the same. ``values`` is None if type or shape differ."""

    name: str
    before: TensorInfo
    after: TensorInfo
    values: Values | None = None


class Renamed(_Record):
    """A tensor that has another name in the second graph, and the same type, shape and values."""

    before: str
    after: str


class GraphDiff(_Record):
    """What differs between two ONNX graphs: tensors (weights and constants) by name, and operators by count.

    ``changed`` has those of another type or shape first, then those that changed most.
    """

    unchanged: int = 0
    changed: tuple[TensorChange, ...] = ()
    added: tuple[TensorInfo, ...] = ()
    removed: tuple[TensorInfo, ...] = ()
    renamed: tuple[Renamed, ...] = ()
    operators: tuple[OperatorChange, ...] = ()

    @property
    def same(self) -> bool:
        return not (self.changed or self.added or self.removed or self.renamed or self.operators)


class VariantDiff(_Record):
    """What differs between two forms of a model.

    ``size_before`` and ``size_after`` are bytes of graph and weights, and ``shared`` those of the second that the first
    archive holds too. ``same_model`` tells that graph and weights are the same; None: there is one form alone.
    ``graph`` is None if they are, and where they were not looked into; ``notes`` then say why.
    """

    name: str
    state: Literal["added", "removed", "changed", "unchanged"]
    size_before: int | None = None
    size_after: int | None = None
    shared: int = 0
    same_model: bool | None = None
    changes: tuple[Change, ...] = ()
    measures: tuple[Measure, ...] = ()
    latency: tuple[LatencyChange, ...] = ()
    graph: GraphDiff | None = None
    golden_cases: int = 0
    goldens: tuple[GoldenChange, ...] = ()
    notes: tuple[str, ...] = ()


class Side(_Record):
    """An archive, or the variant of it that was named; ``size`` is the bytes of its blobs, each counted once."""

    label: str
    digest: str
    size: int


class Diff(_Record):
    """What differs between two archives. ``shared`` is how many bytes of the second the first holds too."""

    schema_version: Literal[1] = 1
    before: Side
    after: Side
    shared: int
    changes: tuple[Change, ...] = ()
    variants: tuple[VariantDiff, ...] = ()

    @property
    def same(self) -> bool:
        return not self.changes and all(variant.state == "unchanged" for variant in self.variants)
