"""The differences between two archives as records: numbers and short texts, ready for JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Change(_Record):
    """A property that differs; None means that it is absent."""

    what: str
    before: str | None = None
    after: str | None = None


class Measure(_Record):
    """A measurement of both; None means not measured, or not finite."""

    what: str
    before: float | None = None
    after: float | None = None


class LatencyChange(_Record):
    """The median seconds of one engine call at a batch size; None means not measured."""

    rows: int
    before: float | None = None
    after: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speedup(self) -> float | None:
        """How many times as fast the second is."""
        return self.before / self.after if self.before and self.after else None


class GoldenChange(_Record):
    """The difference of an output, over the golden cases that both have.

    ``difference`` is the largest absolute difference relative to the output's largest value. None means not comparable:
    types, shapes, NaNs, or values that are not floating-point differ.
    """

    tensor: str
    difference: float | None


class OperatorChange(_Record):
    """The number of nodes of one operator, where it differs."""

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
    """The difference of the values of two tensors of the same type and shape.

    ``relative`` is ||after - before|| / ||before||, ``largest`` the largest absolute difference; both over elements
    that are finite on both sides, in double precision. None means undefined: the tensor was all zeros, holds text, or
    its squares overflow. ``count`` is the number of elements that differ, and ``odd`` that of those which are NaN or
    infinite on either side.
    """

    relative: float | None = None
    largest: float | None = None
    count: int
    odd: int = 0


class TensorChange(_Record):
    """A tensor of both graphs that differs. ``values`` is None if type or shape differ."""

    name: str
    before: TensorInfo
    after: TensorInfo
    values: Values | None = None


class Renamed(_Record):
    """A tensor with another name in the second graph, and the same type, shape and values."""

    before: str
    after: str


class GraphDiff(_Record):
    """The differences between two ONNX graphs: tensors (weights and constants) by name, operators by count.

    ``changed`` lists tensors of another type or shape first, then in order of change.
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


class StepChange(_Record):
    """A step before the graph, compared with that of the same kind on the same raw items.

    Attributes:
        step: its kind.
        what: the values that are compared, and what the items are.
        items: how many.
        differ: of how many the values differ.
        refused: how many of these only one of the two accepts.
        largest: the largest absolute difference; None for tokens, and if shapes differ.
        levels: the same in levels of a pixel, from 0 to 255; None for other values, or if the two scale differently.
    """

    step: str
    what: str
    items: int
    differ: int
    refused: int = 0
    largest: float | None = None
    levels: float | None = None


class LabelsChange(_Record):
    """The names of classes that differ; ``moved`` are those of another number."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


class AnswerChange(_Record):
    """A final answer over the items of the raw goldens of both archives.

    ``differ`` counts items with another answer, of texts with another first one, such as the best label. ``largest`` is
    the largest absolute difference; None for texts, and if shapes differ.
    """

    answer: str
    items: int = 0
    differ: int = 0
    largest: float | None = 0.0


class ChangedInput(_Record):
    """A raw input whose answer changed: the best label if that differs, and the largest difference of numbers."""

    input: str
    before: str = ""
    after: str = ""
    difference: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Larger for larger changes; labels come first."""
        return int(self.before != self.after), self.difference


class StepsDiff(_Record):
    """The differences between the steps of two variants; ``most`` are the inputs whose answers changed most."""

    steps: tuple[StepChange, ...] = ()
    labels: LabelsChange | None = None
    answers: tuple[AnswerChange, ...] = ()
    most: tuple[ChangedInput, ...] = ()
    notes: tuple[str, ...] = ()


class VariantDiff(_Record):
    """The differences between two forms of a model.

    ``size_before`` and ``size_after`` are the bytes of graph and weights; ``shared`` is the part of the second that the
    first archive has too. ``same_model`` is whether graph and weights are equal; None if there is only one form.
    ``graph`` is None if they are, and if they were not compared; ``notes`` then give the reason. ``steps`` is None
    unless both have steps.
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
    steps: StepsDiff | None = None
    notes: tuple[str, ...] = ()


class Side(_Record):
    """An archive or its named variant; ``size`` is the total bytes of its distinct blobs."""

    label: str
    digest: str
    size: int


class Diff(_Record):
    """The differences between two archives. ``shared`` is the part of the second, in bytes, that the first has too."""

    schema_version: Literal[1] = 1
    before: Side
    after: Side
    shared: int
    changes: tuple[Change, ...] = ()
    variants: tuple[VariantDiff, ...] = ()

    @property
    def same(self) -> bool:
        return not self.changes and all(variant.state == "unchanged" for variant in self.variants)
