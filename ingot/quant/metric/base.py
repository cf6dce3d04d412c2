"""The interface of metrics, and the arrangement of two models' outputs in rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.data.samples import Samples
from ingot.tensors import Array, DType, Signature

_ROUNDING = 1e-9
Outputs = Mapping[str, Array]
"""One batch's outputs by name."""


@dataclass(frozen=True)
class Score:
    """A value and its 95 % interval, from resampling the rows; NaN at both ends if resampling yields none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A metric of the original and of the model made from it.

    Attributes:
        before: the original's.
        after: the other's.
        drop: how much worse the other is, whichever direction is better; its interval is from the same resampled rows
            for both, and so is narrower than those of the two.
    """

    before: Score
    after: Score
    drop: Score


def within(drop: float, budget: float) -> bool:
    """Return whether a metric's drop is within a budget, up to rounding."""
    return drop <= budget + _ROUNDING


class Metric(ABC):
    """A measure of a model's outputs.

    Attributes:
        name: as requested, completed with defaults.
        labels: the extra that it needs, or None.
        groups: the extra that groups rows, or None if rows are independent.
    """

    name: str
    labels: str | None = None
    groups: str | None = None

    @property
    def identity(self) -> str:
        """The name, and everything else that must be equal for values to be comparable."""
        return self.name

    def check(self, samples: Samples) -> None:  # noqa: B027 - most metrics of agreement take any data
        """Check that the metric can be computed on this data.

        Raises:
            InvalidArgument: labels are missing or wrong, or there are too few rows.
        """

    def notes(self, expected: Sequence[Outputs], before: Score, samples: Samples) -> tuple[str, ...]:
        """Return caveats about the original's outputs, from which a drop is computed.

        Args:
            expected: the original's outputs, one mapping per batch of ``samples.batches()``.
            before: their score.
            samples: its inputs.
        """
        return ()

    @abstractmethod
    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        """Compare two models' outputs.

        Args:
            expected: the original's, one mapping per batch of ``samples.batches()``.
            actual: the other's.
            samples: the inputs of both.

        Raises:
            InvalidArgument: the metric does not apply to the outputs.
            QuantizationError: the other has NaN, infinity or other shapes where the original does not.
        """


def float_outputs(signature: Signature) -> list[str]:
    """Return the names of the floating-point outputs."""
    return [spec.name for spec in signature.outputs if spec.dtype.is_float]


def find_output(signature: Signature, output: str | None, metric: str) -> str:
    """Return the output of a metric: the named one, or the only one, or the only floating-point one.

    Raises:
        InvalidArgument: there is no such output, or several could be meant.
    """
    names = [spec.name for spec in signature.outputs]
    if output is not None:
        if output not in names:
            raise InvalidArgument(f"the model has no output '{output}' for the metric {metric}; it has: {_join(names)}")
        return output
    candidates = names if len(names) == 1 else float_outputs(signature)
    if len(candidates) != 1:
        raise InvalidArgument(
            f"the metric {metric} needs one output, and the model has: {_join(names)}; choose one with "
            f"{metric}:output=NAME"
        )
    return candidates[0]


def rows_of(batches: Sequence[Outputs], name: str, signature: Signature) -> list[Array]:
    """Return an output's arrays with the rows on the first axis; a model without a batch has one row per batch."""
    axis = next(spec for spec in signature.outputs if spec.name == name).axis(signature.batch)
    if axis is None:
        return [batch[name][None] for batch in batches]
    return [np.moveaxis(batch[name], axis, 0) for batch in batches]


def pairs_of(
    expected: Sequence[Outputs], actual: Sequence[Outputs], name: str, samples: Samples
) -> list[tuple[Array, Array]]:
    """Return an output of both models batch by batch, with the rows first.

    Raises:
        QuantizationError: they differ in shape, or in number from the data.
    """
    left, right = (rows_of(batches, name, samples.signature) for batches in (expected, actual))
    count = sum(map(len, left))
    if count != samples.rows:
        raise QuantizationError(f"the model returns {count} rows in '{name}' for {samples.rows} rows of data")
    for before, after in zip(left, right, strict=True):
        if before.shape != after.shape:
            raise QuantizationError(
                f"the quantized model returns the shape {list(after.shape)} in '{name}', the original "
                f"{list(before.shape)}"
            )
    return list(zip(left, right, strict=True))


def comparable_pairs(
    expected: Sequence[Outputs], actual: Sequence[Outputs], name: str, samples: Samples
) -> list[tuple[Array, Array]]:
    """Return the result of :func:`pairs_of` for outputs with finite values.

    Raises:
        InvalidArgument: the original returns only NaN and infinity, or nothing at all.
        QuantizationError: see :func:`pairs_of`.
    """
    pairs = pairs_of(expected, actual, name, samples)
    if not any(has_value(before) for before, _ in pairs):
        raise InvalidArgument(f"the original has no finite value in '{name}' for this data, so it cannot be compared")
    return pairs


def has_value(array: Array) -> bool:
    """Return whether an array has a finite value."""
    return array.size > 0 and (not DType.of(array).is_float or bool(np.isfinite(array.astype(np.float64)).any()))


def finite_pair(name: str, before: Array, after: Array) -> tuple[Array, Array]:
    """Return both as float64 [rows, values]; where the original is not finite, both are 0, so that they do not count.

    Raises:
        QuantizationError: the other is not finite where the original is.
    """
    left, right = (array.reshape(len(array), -1).astype(np.float64) for array in (before, after))
    sound = np.isfinite(left)
    if not np.isfinite(right[sound]).all():
        raise QuantizationError(
            f"the quantized model returns NaN or infinity in '{name}' where the original does not; calibrate with "
            "data like that in production"
        )
    return (left, right) if sound.all() else (np.where(sound, left, 0.0), np.where(sound, right, 0.0))


def flat_rows(parts: Sequence[Array], name: str, metric: str) -> Array:
    """Return an output's batches as one array [rows, values]; floating-point ones in float64.

    Raises:
        InvalidArgument: its rows are of several sizes.
    """
    flat = [part.reshape(len(part), -1) for part in parts]
    if len({part.shape[1] for part in flat}) > 1:
        raise InvalidArgument(
            f"the output '{name}' has rows of several sizes, which the metric {metric} does not support; choose "
            f"another with {metric}:output=NAME"
        )
    joined = np.concatenate(flat)
    return joined.astype(np.float64) if DType.of(joined).is_float else joined


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
