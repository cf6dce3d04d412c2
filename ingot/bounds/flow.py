"""How a tensor depends on the samples of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ingot.bounds.abstract import UnboundedError
from ingot.bounds.poly import ONE, Poly, Size


class MixingError(UnboundedError):
    """An operator combines samples, or may do so; the text says how."""


class Kind(Enum):
    """The data that a tensor depends on, besides inputs without samples, which all requests of a batch share."""

    SHARED = "nothing else"
    COUNTED = "the number of samples"
    SAMPLES = "in each part, on one sample"
    MIXED = "on several samples, on their number or on their order"


@dataclass(frozen=True, slots=True)
class Flow:
    """The data that a tensor depends on.

    The rest describes SAMPLES: dimension ``axis`` of ``rank`` has ``size`` elements, a multiple of the number of
    samples. Of a part of ``inner`` times that number of elements, the first ``inner`` depend on the first sample only,
    and so on; None if all elements are equal. ``positions`` is whether each value is the index of its sample, and
    ``columns`` are the places of the last dimension where it is. ``reason`` says why a tensor is MIXED, and
    ``node`` is the first output of the node where it became so. If ``plane`` is not None, values count elements from
    the first sample on, and only their remainders by ``plane`` are those of one sample.

    Of a COUNTED list, ``columns`` are the only places that depend on the number of samples; all may if it is empty.
    """

    kind: Kind
    axis: int = 0
    rank: int = 0
    size: Poly = ONE
    inner: Poly | None = ONE
    positions: bool = False
    columns: frozenset[int] = frozenset()
    reason: str = ""
    node: str = ""
    plane: Poly | None = None

    @property
    def sampled(self) -> bool:
        return self.kind is Kind.SAMPLES

    @property
    def counted(self) -> bool:
        return self.kind is Kind.COUNTED

    def at(self, axis: int, rank: int) -> Flow:
        """Return the samples in another dimension, of other values.

        Raises:
            MixingError: the values are positions of samples, which differ from batch to batch.
        """
        if self.located:
            raise MixingError("it computes with the positions of samples in the batch")
        return replace(self, axis=axis, rank=rank)

    def moved(self, axis: int, rank: int) -> Flow:
        """Return the same values with the samples in another dimension.

        Raises:
            MixingError: positions of samples are among other values, whose place is lost.
        """
        if self.columns or self.plane is not None:
            raise MixingError("it rearranges positions of samples in the batch")
        return replace(self, axis=axis, rank=rank)

    @property
    def located(self) -> bool:
        """Whether values are, or count from, positions of samples."""
        return self.positions or bool(self.columns) or self.plane is not None

    @property
    def plain(self) -> Flow:
        """Other values of the same samples."""
        return self.at(self.axis, self.rank)

    def joined(self, other: Flow) -> Flow:
        """Return the flow of a tensor that is either of two."""
        if self == other:
            return self
        kinds = {self.kind, other.kind}
        if Kind.MIXED in kinds:
            return self if self.kind is Kind.MIXED else other
        if kinds <= {Kind.SHARED, Kind.COUNTED}:
            return COUNTED
        if self.located or other.located:
            return Flow(Kind.MIXED, reason="it has positions of samples in one case, and other values in another")
        alike = (self.axis, self.rank, self.size) == (other.axis, other.rank, other.size)
        ordered = None in (self.inner, other.inner) or self.inner == other.inner
        if kinds == {Kind.SAMPLES} and alike and ordered:
            return replace(self, inner=self.inner if other.inner is None else other.inner)
        return Flow(Kind.MIXED, reason="its value has samples in one case, and in another none, or elsewhere")


SHARED, COUNTED = Flow(Kind.SHARED), Flow(Kind.COUNTED)


def mentions(poly: Poly, dim: str) -> bool:
    """Return whether a size depends on a named dimension."""
    for monomial in poly.terms:
        for name, _ in monomial:
            if not isinstance(name, Size) or name.value is None:
                if str(name) == dim:
                    return True
                continue
            parts = [*name.lows, *name.highs, *([name.division[0]] if name.division else [])]
            if any(mentions(part, dim) for part in parts):
                return True
    return False
