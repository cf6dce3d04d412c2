"""Differences between the tensors of two graphs, and between the values of two tensors.

Values are read in blocks, and only if digests differ, so that memory use is small for tensors of any size.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from ingot.errors import InvalidArchive
from ingot.model_store.diff.records import GraphDiff, OperatorChange, Renamed, TensorChange, TensorInfo, Values
from ingot.report.text import one_line
from ingot.tensors import Array

_BLOCK = 3 << 18  # bytes; a multiple of every element's size, of 6 bits too


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph, whose bytes are read on demand.

    ``element`` is None for text; ``bits`` is the size of an element in the file.
    """

    info: TensorInfo
    digest: str
    content: Callable[[], Iterable[bytes]]
    _: KW_ONLY
    element: np.dtype[Any] | None = None
    bits: int = 0

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """Equal for tensors of the same type, shape and values."""
        return self.info.dtype, self.info.shape, self.digest


@dataclass
class Graph:
    """The tensors of a variant's graphs by name, and the number of nodes per operator."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def about(where: str) -> Iterator[None]:
    """Prefix errors with the name of the archive."""
    try:
        yield
    except InvalidArchive as error:
        raise InvalidArchive(f"{where}: {error}") from error


def compare(before: Graph, after: Graph, progress: Callable[[str], None] = lambda step: None) -> GraphDiff:
    """Compare the tensors of two graphs by name, and their operators by count.

    Raises:
        InvalidArchive: the data of a tensor is missing or damaged.
    """
    common = [name for name in before.tensors if name in after.tensors]
    differing = [name for name in common if before.tensors[name].key != after.tensors[name].key]
    known: dict[tuple[str, str, str], Values] = {}
    changed = []
    for number, name in enumerate(differing, 1):
        progress(f"Comparing tensor {number} of {len(differing)}: {one_line(name)}")
        changed.append(_change(name, before.tensors[name], after.tensors[name], known))
    removed = {name: tensor for name, tensor in before.tensors.items() if name not in after.tensors}
    added = {name: tensor for name, tensor in after.tensors.items() if name not in before.tensors}
    renamed = _take_renamed(removed, added)
    return GraphDiff(
        unchanged=len(common) - len(differing),
        changed=tuple(sorted(changed, key=_rank)),
        added=tuple(tensor.info for tensor in added.values()),
        removed=tuple(tensor.info for tensor in removed.values()),
        renamed=tuple(renamed),
        operators=tuple(_operators(before.operators, after.operators)),
    )


def _operators(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[OperatorChange]:
    for name in sorted({*before, *after}):
        change = OperatorChange(operator=name, before=before.get(name, 0), after=after.get(name, 0))
        if change.before != change.after:
            yield change


def _take_renamed(removed: dict[str, Tensor], added: dict[str, Tensor]) -> list[Renamed]:
    """Remove tensors from both that are equal under different names."""
    places: dict[object, list[str]] = {}
    for name, tensor in reversed(added.items()):
        places.setdefault(tensor.key, []).append(name)
    found = []
    for name, tensor in list(removed.items()):
        if places.get(tensor.key):
            found.append(Renamed(before=name, after=places[tensor.key].pop()))
            del removed[name], added[found[-1].after]
    return found


def _change(name: str, before: Tensor, after: Tensor, known: dict[tuple[str, str, str], Values]) -> TensorChange:
    values = None
    if (before.info.dtype, before.info.shape) == (after.info.dtype, after.info.shape):
        # Several names may refer to one blob, which is read once.
        key = before.info.dtype, before.digest, after.digest
        values = known.get(key) or known.setdefault(key, _values(before, after))
    return TensorChange(name=name, before=before.info, after=after.info, values=values)


def _rank(change: TensorChange) -> tuple[float, ...]:
    """Return a sort key: tensors of another type or shape first, then in order of change."""
    values = change.values
    if values is None:
        return (-math.inf,)
    return tuple(0.0 - (math.inf if item is None else item) for item in (values.relative, values.largest))


def _values(before: Tensor, after: Tensor) -> Values:
    if before.element is None or after.element is None:
        pairs = zip(before.content(), after.content(), strict=True)
        return Values(count=sum(one != other for one, other in pairs))
    left = math.prod(before.info.shape)
    count = odd = 0
    base = difference = largest = 0.0
    # Weights may be NaN, or their squares may overflow; the result then shows it.
    with np.errstate(all="ignore"):
        for blocks in zip(_blocks(before.content()), _blocks(after.content()), strict=True):
            one, other = (_elements(block, before.element, before.bits)[:left] for block in blocks)
            left -= len(one)
            count += int(np.count_nonzero((one != other) & ~((one != one) & (other != other))))
            one, other = _doubles(one), _doubles(other)
            finite = np.isfinite(one) & np.isfinite(other)
            odd += int(np.count_nonzero(~finite & (one != other) & ~((one != one) & (other != other))))
            one, other = one[finite], other[finite]
            base += float(one @ one)
            other -= one
            difference += float(other @ other)
            largest = max(largest, float(np.abs(other).max(initial=0.0)))
    relative = math.sqrt(difference) / math.sqrt(base) if base else None if difference else 0.0
    return Values(relative=_finite(relative), largest=_finite(largest), count=count, odd=odd)


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split a stream into blocks that end between two elements."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= _BLOCK:
            yield bytes(held[:_BLOCK])
            del held[:_BLOCK]
    if held:
        yield bytes(held)


def _elements(block: bytes, element: np.dtype[Any], bits: int) -> Array:
    raw = np.frombuffer(block, np.uint8)
    if bits < 8:  # packed, lowest bits first; numpy uses a byte per element
        single = np.unpackbits(raw, bitorder="little")
        raw = np.packbits(single[: len(single) // bits * bits].reshape(-1, bits), axis=1, bitorder="little").reshape(-1)
    return raw if element.kind == "b" else raw.view(element)  # bytes of bool may be other than 0 or 1


def _doubles(array: Array) -> Array:
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    return array.astype(np.float64)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
