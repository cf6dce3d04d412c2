"""What the code of a handler does to a request, in the terms of declared steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from ingot.steps.after.classify import Function
from ingot.steps.images.operations import CenterCrop, Operation, Resize

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Stage(IntEnum):
    """How far a value is on the way from a request to the answer; stages before ROWS are of other values."""

    UNKNOWN = 0
    CONSTANT = 1
    NAMES = 2
    HANDLER = 3
    MODEL = 4
    TOKENIZER = 5
    TRANSFORMS = 6
    ROWS = 7
    RAW = 8
    TEXT = 9
    PICTURE = 10
    TOKENS = 11
    PIXELS = 12
    LOGITS = 13
    SCORES = 14
    CLASSES = 15
    ANSWER = 16


@dataclass(frozen=True)
class Form:
    """What becomes of a request.

    Attributes:
        part: the name of the value in the row that is read, unless it is the body; empty otherwise.
        operations: on the pixels of a picture.
        upright: whether a picture is turned as its EXIF data says.
        tokens: options of the tokenizer; None for a picture.
        inputs: the tokenizer's results that the model gets, in its order.
        function: the function that turns logits into scores.
        best: the number of best classes in the answer; 0 for all.
    """

    part: str = ""
    operations: tuple[Operation, ...] = ()
    upright: bool = False
    tokens: Mapping[str, Any] | None = None
    inputs: tuple[str, ...] = ()
    function: Function = "none"
    best: int = 0

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The height and width of pictures after the operations; None where these depend on the picture."""
        found: tuple[int | None, int | None] = (None, None)
        for each in self.operations:
            if isinstance(each, CenterCrop) or (isinstance(each, Resize) and each.rule == "exact"):
                found = int(each.height), int(each.width)
            elif isinstance(each, Resize):
                found = None, None
        return found


@dataclass(frozen=True)
class Value:
    """A value of the code. It stands for each sample of a batch, also if it is a list or an element of one.

    Attributes:
        stage: see :class:`Stage`.
        content: of a constant its value, of other code its name, of a tuple its values.
        form: what has been done to the request so far.
    """

    stage: Stage = Stage.UNKNOWN
    content: Any = None
    form: Form = field(default_factory=Form)

    @property
    def followed(self) -> bool:
        """Whether the value comes from a request."""
        return self.stage >= Stage.ROWS


UNKNOWN = Value()


def furthest(values: Iterable[Value]) -> Value:
    """Return the value of the latest stage; of several, the first."""
    return max(values, key=lambda each: each.stage, default=UNKNOWN)
