"""Declared ranges of an input's values.

A range serves two purposes: requests with other values are refused before the model runs, and values that become sizes
or trip counts bound the model's work and memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ingot.errors import InvalidArgument

Number = int | float

_NUMBER = r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,4})?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})?\.\.(?P<high>{_NUMBER})?")
# Generated integers lie within this distance of the value nearest to zero.
_WIDEST = 1 << 16
# Characters: each refused request repeats it.
_LONGEST_SOURCE = 400


@dataclass(frozen=True)
class ValueRange:
    """The allowed values of an input, ends included; None means the limit of the datatype. NaN is never allowed.

    ``source`` is why other values are refused, if the range follows from the graph, such as ``it selects from 30522 of
    'words' in node ...``; it is None if the range was declared.
    """

    low: Number | None = None
    high: Number | None = None
    source: str | None = field(default=None, compare=False, kw_only=True)

    def __str__(self) -> str:
        return f"{'' if self.low is None else self.low}..{'' if self.high is None else self.high}"

    def check(self, name: str, dtype: np.dtype[Any]) -> None:
        """Check that an input can have this range.

        Args:
            name: the input's name.
            dtype: the input's datatype.

        Raises:
            InvalidArgument: the datatype is neither integer nor floating-point, an end is not one of its values, the
                range is empty, or it has no end; or its source is too long.
        """
        if not _is_integer(dtype) and not _is_float(dtype):
            kind = "text" if dtype.kind == "O" else dtype.name
            raise InvalidArgument(
                f"input '{name}' is {kind}, but only integer and floating-point inputs have a range of values; "
                f"leave out '={self}'"
            )
        if self.low is None and self.high is None:
            raise InvalidArgument(f"the range of values of input '{name}' has no end; write at least one, such as 0..")
        for end in (self.low, self.high):
            if end is not None:
                _check_end(end, name, dtype)
        if self.source is not None and not (len(self.source) <= _LONGEST_SOURCE and self.source.isprintable()):
            raise InvalidArgument(
                f"the source of the range of values of input '{name}' is not one line of at most {_LONGEST_SOURCE} "
                "printable characters"
            )
        if self.low is not None and self.high is not None and self.high < self.low:
            raise InvalidArgument(f"the range of values {self} of input '{name}' is empty; write the lower end first")

    def outside(self, array: npt.NDArray[Any]) -> tuple[int, ...] | None:
        """Return the index of the first value outside the range, or None.

        Ends of a floating-point range are rounded to the array's datatype, as the client's values are.
        """
        if not array.size:
            return None
        # In one pass: a negative number is larger than all others as an unsigned one.
        unsigned = self.low == 0 and self.high is not None and array.dtype.kind == "i"
        if unsigned and array.view(f"u{array.itemsize}").max() <= self.high:
            return None
        low, high = (end if end is None else array.dtype.type(end) for end in (self.low, self.high))
        # Comparisons with NaN, which minimum and maximum propagate, are false.
        if (low is None or array.min() >= low) and (high is None or array.max() <= high):
            return None
        fits = np.ones(array.shape, bool)
        if low is not None:
            fits &= array >= low
        if high is not None:
            fits &= array <= high
        return tuple(int(place) for place in np.unravel_index(int(np.argmin(fits)), array.shape))

    def nearest(self, value: Number) -> Number:
        """Return the value of the range that is nearest to ``value``."""
        value = value if self.low is None else max(value, self.low)
        return value if self.high is None else min(value, self.high)

    def clip(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array with each value replaced by the nearest one of the range."""
        low, high = (end if end is None else array.dtype.type(end) for end in (self.low, self.high))
        return np.asarray(np.clip(array, low, high)).astype(array.dtype, copy=False)

    def draw(self, rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return random values of the range: uniform if it has two ends, otherwise near the value nearest to zero.

        Integers are within 65,536 of the value nearest to zero, so that a wide range of a size or a trip count does not
        make the model run for hours.
        """
        if _is_float(dtype):
            if self.low is None or self.high is None:
                return self.clip(rng.standard_normal(shape).astype(dtype))
            share = rng.random(shape)  # not uniform(low, high), whose difference may overflow
            return self.clip((self.low * (1 - share) + self.high * share).astype(dtype))
        middle = int(self.nearest(0))
        low = middle - 1 if self.low is None else max(int(self.low), middle - _WIDEST)
        high = middle + 1 if self.high is None else min(int(self.high), middle + _WIDEST)
        limits = np.iinfo(dtype)
        low, high = max(low, int(limits.min)), min(high, int(limits.max))
        return np.asarray(rng.integers(low, high, shape, dtype=dtype, endpoint=True))


def parse(text: str) -> ValueRange:
    """Parse ``low..high``, where either end may be omitted, such as ``0..4096``, ``-1.5..1.5`` or ``0..``.

    Raises:
        InvalidArgument: ``text`` is not of that form.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(
            f"'{text}' is not a range of values; write low..high, such as 0..4096, where either end may be omitted"
        )
    return ValueRange(*(None if end is None else _number(end) for end in (match["low"], match["high"])))


def _number(text: str) -> Number:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _check_end(end: Number, name: str, dtype: np.dtype[Any]) -> None:
    low: Number
    high: Number
    if _is_integer(dtype):
        if not isinstance(end, int):
            raise InvalidArgument(
                f"the range of values of input '{name}' ends at {end}, but the input is {dtype.name}; "
                "write whole numbers, such as 0..4096"
            )
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    else:
        limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        low, high = float(limits.min), float(limits.max)
    if not low <= end <= high:  # so is NaN
        raise InvalidArgument(
            f"the range of values of input '{name}' ends at {end}, which {dtype.name} cannot hold: "
            f"its values are {low}..{high}"
        )


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu"


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16
