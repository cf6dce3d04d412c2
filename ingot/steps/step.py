"""The base of all kinds of steps, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from ingot.errors import InvalidArgument, quoted
from ingot.tensors import Array, TensorSpec

Values = Mapping[str, Array]
"""Arrays by name, with one row for each item of a request: raw inputs, tensors of the graph, results of steps."""
Apply = Callable[[Values], Values]
"""An opened step: returns new values from those so far. Immutable, so that threads can share it."""
Files = Callable[[str], bytes]
"""Returns the content of a file of the archive by its name."""
Shape = tuple[int | str, ...]
"""Numbers of elements; a name stands for any."""

# Elements that numpy's sums and products process in some 0.2 ms.
VECTORS_AT_ONCE = 1 << 17


class Step(BaseModel):
    """The configuration of one step, as ``serving.json`` has it.

    It has all that is needed to reproduce the step, except for the content of ``files``. An unknown field is refused:
    a step of a newer Ingot that is run without it would compute something else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    kind: str

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and (unknown := fields.keys() - cls.model_fields.keys()):
            raise ValueError(
                f"step '{cls.model_fields['kind'].default}' has no field '{min(unknown)}'; if another version of Ingot "
                "has made it, export the model again"
            )
        return fields

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the archive that it needs."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it needs."""
        raise NotImplementedError

    @property
    def writes(self) -> tuple[str, ...]:
        """The values that it returns."""
        raise NotImplementedError

    @property
    def media(self) -> Mapping[str, str]:
        """The raw inputs that are files, with their media types, such as ``image/*``; empty for any."""
        return {}

    @property
    def lengths(self) -> str:
        """The value with 1 for each element of a row, and 0 for padding behind them, [n, longest]; empty without."""
        return ""

    @property
    def cuts(self) -> Mapping[str, str]:
        """The values that say how much of each item was cut, by their unit: ``tokens`` or ``seconds``."""
        return {}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes that values need, by name: numbers of elements, and names where any number fits."""
        return {}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        """Check that the step fits the graph's outputs.

        Args:
            known: the values so far, None for those of steps that are not known before they run.
            files: as for :meth:`open`; None before they can be read.

        Raises:
            InvalidArgument: it does not.
        """
        for name in self.shapes:
            if (spec := known.get(name)) is not None:
                self.check_shape(name, spec.shape)

    def check_shape(self, name: str, shape: Sequence[int | str]) -> None:
        """Check the shape of a value against :attr:`shapes`.

        Raises:
            InvalidArgument: it has another number of dimensions, or another number of elements.
        """
        needed = self.shapes[name]
        pairs = [pair for pair in zip(needed, shape, strict=False) if not any(isinstance(size, str) for size in pair)]
        if len(shape) != len(needed) or any(size != own for size, own in pairs):
            wanted, given = (", ".join(map(str, each)) for each in (needed, shape))
            raise InvalidArgument(
                f"step '{self.kind}' needs '{name}' of the shape [{wanted}], but it has [{given}]; name the graph's "
                "output that has this shape"
            )

    def made(self, known: Mapping[str, TensorSpec | None]) -> Mapping[str, TensorSpec | None]:
        """Return the types and shapes of what it writes, by name, None for those that are not known before it runs."""
        return dict.fromkeys(self.writes)

    @property
    def shared(self) -> tuple[str, ...]:
        """The raw inputs of which one element may stand for all items."""
        return ()

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """The values that inputs accept, of those that accept few."""
        return {}

    @property
    def bytes_at_once(self) -> int:
        """Most bytes of raw inputs that a step before the graph reads in some 0.2 ms; 0 if it may take longer."""
        return 0

    @property
    def elements_at_once(self) -> int:
        """Most elements of the graph's outputs that a step after it processes in some 0.2 ms; 0 as above."""
        return 1 << 12

    def comparable(self, answers: Values) -> Values:
        """Return answers of this step in a form that machines reproduce but for rounding; by default as they are."""
        return answers

    def steadied(self, raw: Values, answers: Values) -> Values:
        """Return raw inputs that replace those of a golden case, so that rounding changes its answers less."""
        return {}

    def open(self, files: Files) -> Apply:
        """Return the step ready to run; called once when a model is loaded.

        Raises:
            InvalidArchive: a file is damaged.
            Unsupported: a package is missing.
        """
        raise NotImplementedError


def texts_of(name: str, values: Array) -> list[str]:
    """Return the texts of a BYTES input.

    Raises:
        InvalidArgument: an element is not text, or not valid UTF-8.
    """
    found = []
    for index, item in enumerate(values.reshape(-1).tolist()):
        found.append(_text(name, index, item))
    return found


def _text(name: str, index: int, item: Any) -> str:
    where = f"element {index} of input '{name}'"
    try:
        if isinstance(item, bytes):
            return item.decode()
        if isinstance(item, str):
            item.encode()  # refuses lone surrogates
            return item
    except UnicodeError as error:
        raise InvalidArgument(f"{where} is not valid UTF-8 ({error}); send text encoded as UTF-8") from None
    raise InvalidArgument(f"{where} is a {type(item).__name__}, not a text")


def choices_of(name: str, values: Values, default: str, known: Sequence[str], count: int) -> list[str]:
    """Return the choice of an optional BYTES input for each item; ``default`` if the request leaves it out.

    Raises:
        InvalidArgument: an element is not among ``known``.
    """
    found = texts_of(name, values[name]) if name in values else [default]
    for item in found:
        if item not in known:
            raise InvalidArgument(f"input '{name}' is {quoted(item)}; send one of: {', '.join(known)}")
    return found * count if len(found) == 1 else found


def numbers_of(name: str, values: Values, default: int, most: int, count: int) -> Array:
    """Return the number in an optional input for each of ``count`` items; ``default`` if the request leaves it out.

    Raises:
        InvalidArgument: a number is below 1 or above ``most``.
    """
    numbers = values.get(name, np.array([default]))
    if (wrong := numbers[(numbers < 1) | (numbers > most)]).size:
        raise InvalidArgument(f"input '{name}' is {int(wrong[0])}; send a number from 1 to {most}")
    return np.broadcast_to(numbers, count)
