"""Real inputs of a model, checked against its signature, and read in batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data import sources
from ingot.quant.data.sources.collect import collect, pick
from ingot.quant.data.sources.items import Batch
from ingot.tensors import Array, DType, Signature, arrays

Data = Mapping[str, Any] | Iterable[Any] | Array | str | Path
"""What :meth:`Samples.read` takes."""

LIMIT = 4096
"""The most rows that are read from an iterable, a folder of images or recorded traffic."""

__all__ = ["LIMIT", "Batch", "Data", "Samples"]


class Samples:
    """Rows of a model's inputs, and extras such as labels.

    A row is one index of the batch dimension; for a model without one, a row is a whole case. Rows whose other
    dynamic dimensions differ, such as texts of several lengths, never share a batch. The order is always the same:
    that of the data, with rows of one size together.

    Attributes:
        signature: the model's signature.
        rows: their number.
        extras: the names of the arrays that are not inputs.
        classes: the names of the classes, if the labels are from a folder of images.
        where: a suffix for messages that names the source, such as " in data.npz".
        notes: remarks on how the data was read, such as rows that were left out.
        raw: whether steps made the rows of raw inputs.
    """

    def __init__(
        self,
        signature: Signature,
        groups: Sequence[Batch],
        *,
        purpose: str = "calibration data",
        where: str = "",
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        raw: bool = False,
    ):
        self.signature = signature
        self.purpose = purpose
        self.where = where
        self.classes = classes
        self.raw = raw
        fitting = [pick(signature, group, np.arange(rows)) for group in groups if (rows := self._whole(group.rows))]
        if not fitting:
            low = signature.range(signature.batch).low if signature.batch else 1
            raise InvalidArgument(
                f"the {purpose}{where} has fewer rows than the {low} that the model needs in one batch"
            )
        self._groups = tuple(fitting)
        self.rows = sum(group.rows for group in fitting)
        lost = sum(group.rows for group in groups) - self.rows
        self.notes = notes + (
            (f"{lost} rows were left out: the model does not accept a batch of so few",) if lost else ()
        )
        self.extras = tuple(fitting[0].extras)

    @classmethod
    def read(
        cls,
        signature: Signature,
        data: Data,
        *,
        transform: str | None = None,
        purpose: str = "calibration data",
        limit: int = LIMIT,
        steps: sources.OpenSteps = lambda: None,
    ) -> Samples:
        """Read data from arrays, files, folders or an iterable.

        Args:
            signature: the model's signature.
            data: arrays by name with all rows along the batch dimension; the one array of a model with one input; the
                path of an ``.npz``, of an ``.npy`` (one input), or of a folder with one ``.npy`` an input, with images,
                or with recorded traffic; or an iterable, such as a PyTorch DataLoader, of mappings, arrays, or tuples
                of the inputs in the signature's order and at most one more array, the labels. A single tuple is one
                such item. Other arrays are kept as extras, with one value per row.
            transform: how images become arrays, see :class:`ingot.quant.data.sources.transform.ImageTransform`.
            purpose: what the data is for, for messages.
            limit: the largest number of rows to read from iterables, raw data and folders of images or traffic.
            steps: returns the steps of the model, if it has some. With them, the data may be raw: a ``.csv`` or
                ``.jsonl`` of texts with a column for each raw input and ``label``, or a folder of files by class.

        Raises:
            NotFound: there is no such file or folder.
            InvalidArgument: an input is missing, empty, of another type or shape, or holds NaN or infinity; an extra
                has another length; a file cannot be read.
            Unsupported: images are to be read, and Pillow is not installed.
        """
        if limit < 1:
            raise InvalidArgument(f"the limit of rows is {limit}; it must be at least 1")
        source = sources.open_source(signature, data, transform, f"the {purpose}", limit, steps)
        groups, notes = collect(signature, source, f"the {purpose}{source.where}", limit)
        return cls(
            signature,
            groups,
            purpose=purpose,
            where=source.where,
            classes=source.classes,
            notes=(*source.notes, *notes),
            raw=source.raw,
        )

    @cached_property
    def digest(self) -> str:
        """``sha256:`` and the hash of all names, types, shapes and values, whatever container they came in."""
        state = hashlib.sha256()
        for group in self._groups:
            for kind, held in (("input", group.inputs), ("extra", group.extras)):
                for name in sorted(held):
                    array = held[name]
                    head = [kind, name, DType.of(array).value, list(array.shape)]
                    state.update(json.dumps(head).encode() + b"\n")
                    state.update(_raw(array))
        return f"sha256:{state.hexdigest()}"

    def batches(self, rows: int = 32) -> Iterator[Batch]:
        """Yield the data in batches of at most ``rows``, and of no more than the model accepts."""
        for group in self._groups:
            size = self._step(group.rows, rows)
            for start in range(0, group.rows, size):
                yield pick(self.signature, group, np.arange(start, min(start + size, group.rows)))

    def split(self, share: float, seed: int, groups: str | None = None) -> tuple[Samples, Samples]:
        """Split the rows at random into a share and the rest; each part has at least one row.

        ``groups`` is an extra whose equal values mark rows that stay together; see :meth:`groups`.

        Raises:
            InvalidArgument: the share is not between 0 and 1, or there is only one row.
        """
        if not 0 < share < 1:
            raise InvalidArgument(f"a share of {share} cannot be split off; it must be between 0 and 1")
        if self.rows < 2:
            raise InvalidArgument(f"the {self.purpose}{self.where} has only one row and cannot be split in two")
        chosen = self._choose(min(max(round(share * self.rows), 1), self.rows - 1), seed, groups)
        return self._part(chosen), self._part(~chosen)

    def take(self, rows: int, seed: int, groups: str | None = None) -> Samples:
        """Return a random choice of at most ``rows`` rows, in the data's order; see :meth:`split` on ``groups``."""
        return self if rows >= self.rows else self._part(self._choose(max(rows, 1), seed, groups))

    def column(self, name: str) -> Array:
        """Return an extra of all rows, in the order of :meth:`batches`.

        Raises:
            InvalidArgument: there is none of that name, or its rows are of several shapes.
        """
        if name not in self.extras:
            held = ", ".join(self.extras) or "only the inputs"
            raise InvalidArgument(f"the {self.purpose}{self.where} has no array '{name}'; it contains: {held}")
        parts = [group.extras[name] for group in self._groups]
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise InvalidArgument(f"'{name}' in the {self.purpose}{self.where} has rows of several shapes")
        return np.concatenate(parts)

    def groups(self, name: str) -> Array:
        """Return the number of each row's group, from 0: rows belong together whose values in an extra are equal.

        Raises:
            InvalidArgument: there is no such extra, or it has more than one value per row.
        """
        values = self.column(name)
        if values.size != len(values):
            raise InvalidArgument(
                f"'{name}' in the {self.purpose}{self.where} has the shape {list(values.shape)}; groups need one "
                "value per row"
            )
        found: Array = np.unique(values.reshape(-1), return_inverse=True)[1]
        return found

    def _choose(self, count: int, seed: int, groups: str | None) -> Array:
        """Return a mask of ``count`` random rows; if there are groups, of as many whole groups as fit, at least one."""
        rng = np.random.default_rng(seed)
        if groups is None:
            chosen = np.zeros(self.rows, bool)
            chosen[rng.permutation(self.rows)[:count]] = True
            return chosen
        numbers = self.groups(groups)
        sizes = np.bincount(numbers)
        order = rng.permutation(len(sizes))
        fits = np.cumsum(sizes[order]) <= count
        fits[0] = True
        return np.isin(numbers, order[fits])

    def _part(self, chosen: Array) -> Samples:
        ends = np.cumsum([group.rows for group in self._groups])[:-1]
        indexes = [np.flatnonzero(part) for part in np.split(chosen, ends)]
        groups = [
            pick(self.signature, group, index) for group, index in zip(self._groups, indexes, strict=True) if len(index)
        ]
        return Samples(
            self.signature,
            groups,
            purpose=self.purpose,
            where=self.where,
            classes=self.classes,
            notes=self.notes,
            raw=self.raw,
        )

    def _whole(self, rows: int) -> int:
        """Return how many of a group's rows can be used: all, unless the model does not accept a single row."""
        low = max(self.signature.range(self.signature.batch).low, 1) if self.signature.batch else 1
        return rows - rows % low

    def _step(self, rows: int, wanted: int) -> int:
        """Return the largest batch size, up to ``wanted`` if allowed, that leaves no rest, or one the model accepts."""
        if self.signature.batch is None:
            return 1
        bounds = self.signature.range(self.signature.batch)
        size = bounds.nearest(max(wanted, 1))
        while size > max(bounds.low, 1) and rows % size and rows % size not in bounds:
            size -= bounds.step
        return max(size, 1)


def _raw(array: Array) -> bytes | memoryview:
    """Return an array's bytes, without a copy where possible, since it may be large."""
    if array.dtype == object:
        return arrays.to_bytes(array)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
