"""Sizes past which a model reads beyond a table, such as that of its positions, found by running it.

The cases of the proof are small, and an engine may answer where the original refuses: OpenVINO reads zeros beyond a
table. So the sizes next to the end of each table that is read by position are tried, and ends that the user declares.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.errors import ExportError
from ingot.export import program
from ingot.export.explain.places import Place, innermost
from ingot.export.program import Eager
from ingot.export.proof.examples import LARGEST, MOST_WORK, Examples
from ingot.export.proof.indices import failure_of
from ingot.export.torch_internals import TorchDispatchMode, forget_compiled, pytree
from ingot.tensors import Array, Range

# Pairs of sizes at which reads are compared, in steps: the first that a call can afford.
_SIZES = ((9, LARGEST), (3, 9))
# The most larger sizes to try for a dimension, each where the last ones predict a read beyond a table.
_TRIES = 6
# The most that a call at a large size may take: FLOPs of its layers, bytes of a tensor, operators, input elements.
_MOST_WORK = 3e11
_MOST_BYTES = 1 << 30
_MOST_OPERATORS = 20_000
_MOST_ELEMENTS = 1 << 26

_Key = tuple[str, str, int]


@dataclass(frozen=True)
class _Read:
    """One line's reads of a table: the table's name or a description, its rows, the largest row read, and the line."""

    table: str
    rows: int
    last: int
    line: str

    def __str__(self) -> str:
        place = f" at {self.line}" if self.line else ""
        return f"{self.table} has {self.rows} rows, which are read by position{place}"


@dataclass
class _Run:
    """The reads of a call by operator, table and rows, the bytes of all results in order, and the error, if any."""

    size: int
    reads: dict[_Key, _Read] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)
    error: str | None = None


def bounded(eager: Eager, examples: Examples, *, strict: bool) -> tuple[Examples, list[str]]:
    """Return examples within the sizes of a model's tables, and a note on each dimension that they limit.

    The model must run at the examples' default sizes. Nothing is tried on a GPU, which an index out of range makes
    unusable for the process.

    Args:
        eager: the model.
        examples: inputs that it runs on.
        strict: refuse a declared end that the model rejects; otherwise it is lowered.

    Raises:
        ExportError: the model rejects a declared end.
    """
    notes: list[str] = []
    if eager.device.type != "cpu":
        return examples, notes
    names = {
        tensor.untyped_storage().data_ptr(): name
        for name, tensor in (*eager.module.named_parameters(), *eager.module.named_buffers())
        if tensor.layout is torch.strided
    }
    for dim, bounds in examples.ranges.items():
        if bounds.high is not None and bounds.high <= LARGEST * bounds.step:
            continue
        search = _Search(eager, examples, dim, names)
        found = search.run()
        examples = examples.at(search.ends)
        if found is None:
            continue
        last, reason = found
        narrower = Range(bounds.low, last, bounds.step)
        if strict and bounds.high is not None:
            raise ExportError(f"{reason}; declare {dim}={narrower}")
        examples = examples.within({dim: narrower})
        notes.append(f"{reason}; the archive accepts {dim}={narrower}")
    return examples, notes


class _Search:
    """The search for the last size of a dimension at which a model runs.

    Args:
        eager: the model.
        examples: inputs that it runs on.
        dim: the dimension.
        names: names of weights and buffers, by the address of their storage.

    Attributes:
        ends: sizes next to the ends of tables at which the model runs, for the proof.
    """

    def __init__(self, eager: Eager, examples: Examples, dim: str, names: Mapping[int, str]):
        self._eager, self._examples, self._dim, self._names = eager, examples, dim, names
        self._bounds = examples.ranges[dim]
        self._others: Mapping[str, int] = {}
        self._fill = 0
        self.ends: list[dict[str, int]] = []

    def run(self) -> tuple[int, str] | None:
        """Return the last size at which the model runs, and why it runs at no larger one; None if it may.

        Integers that the user did not give are all 0 or all 1: with equal values, only reads by position differ between
        sizes. Positions may be counted from a mask of ones, or from identifiers that are not those of padding.
        """
        counted = any(
            spec.dtype.is_integer and not self._examples.is_given(spec.name) for spec in self._examples.inputs
        )
        runs: list[_Run] = []
        for fill in (1, 0) if counted else (0,):  # the end of a declared range is tried with the last
            self._fill = fill
            runs = self._first()
            found = self._beyond_tables(runs) if runs else None
            if found is not None:
                return found
        return self._at_end(runs) if runs else None

    def _first(self) -> list[_Run]:
        """Return runs at two small sizes, with the others at the least sizes at which the model runs; none if rejected.

        None are returned of a model that selects nothing by row, and has no declared end.
        """
        bounds, step, examples = self._bounds, self._bounds.step, self._examples
        least = {dim: item.nearest(0) for dim, item in examples.ranges.items()}
        for others, (small, large) in itertools.product((least, examples.default_sizes), _SIZES):
            low, high = (bounds.nearest(count * step) for count in (small, large))
            if low == high:
                low, high = bounds.low, bounds.low + (large - small) * step
            self._others = others
            # The default sizes are run by every proof, whatever they take.
            if high not in bounds or not examples.affordable(
                {**others, self._dim: high}, max(MOST_WORK, examples.work)
            ):
                continue
            first = self._tried(low)
            if first.error is None and not first.reads and bounds.high is None:
                return []
            if first.error is None and (second := self._tried(high)).error is None:
                return [first, second]
        return []

    def _beyond_tables(self, runs: list[_Run]) -> tuple[int, str] | None:
        step = self._bounds.step
        for _ in range(_TRIES):
            before, now = runs[-2:]
            predicted = [item for item in _reaching(before, now, step) if item[0] in self._bounds]
            if not predicted:
                return None
            size, read = min(predicted, key=lambda item: item[0])
            if not self._fits(runs, size):
                return size - step, f"{read}, so the model is not expected to run at {self._dim}={size}"
            tried = self._tried(size)
            if tried.error is not None:
                last = self._last(now.size, size, runs)
                self._prove(last)
                return last, f"the model does not run at {self._dim}={last + step} ({tried.error}): {read}"
            self._prove(size)
            runs.append(tried)
        return None

    def _at_end(self, runs: Sequence[_Run]) -> tuple[int, str] | None:
        end = self._bounds.high
        if end is None or self._examples.stretched or end <= runs[-1].size or not self._fits(runs, end):
            return None
        tried = self._tried(end)
        if tried.error is None:
            return None
        last = self._last(runs[-1].size, end, runs)
        return last, f"the model does not run at {self._dim}={end} ({tried.error})"

    def _last(self, accepted: int, rejected: int, runs: Sequence[_Run]) -> int:
        """Return the last size at which the model runs, between one that it accepts and one that it rejects."""
        step = self._bounds.step
        middle = rejected - step  # where a table ends, if the prediction is exact
        while rejected - accepted > step:
            if not self._fits(runs, middle) or self._tried(middle).error is None:
                accepted = middle
            else:
                rejected = middle
            middle = (accepted + rejected) // 2 // step * step
        return accepted

    def _prove(self, size: int) -> None:
        sizes = {**self._others, self._dim: size}
        if self._examples.affordable(sizes):
            self.ends.append(sizes)

    def _tried(self, size: int) -> _Run:
        run = _Run(size)
        inputs = self._inputs({**self._others, self._dim: size})
        run.error = failure_of(lambda: self._eager.run(inputs, within=lambda tensors: _Reads(run, self._names)))
        if run.error is not None:  # torch.cond does not run while it is observed
            forget_compiled()
        return run

    def _inputs(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        examples = self._examples
        made = examples.make(sizes, varied=False)
        for spec in examples.inputs:
            if spec.dtype.is_integer and not examples.is_given(spec.name):
                made[spec.name] = np.full_like(made[spec.name], self._fill)
        return examples.fitted(made)

    def _fits(self, runs: Sequence[_Run], size: int) -> bool:
        """Return whether a call is expected to be cheap at a size, from the growth between two smaller ones."""
        before, now = runs[0], runs[1]
        growth = size / now.size
        sizes = {**self._others, self._dim: size}
        shapes = ([dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape] for spec in self._examples.inputs)
        if sum(map(math.prod, shapes)) > _MOST_ELEMENTS or not self._examples.affordable(sizes, _MOST_WORK):
            return False
        if len(before.results) != len(now.results):  # a loop over the size
            largest = max(now.results, default=0) * growth**2
            return len(now.results) * growth <= _MOST_OPERATORS and largest <= _MOST_BYTES
        ratio = math.log(now.size / before.size)
        pairs = zip(before.results, now.results, strict=True)
        powers = ((large, math.log(large / small) / ratio) for small, large in pairs if small and large)
        return all(large * growth**power <= _MOST_BYTES for large, power in powers)


def _reaching(before: _Run, now: _Run, step: int) -> Iterable[tuple[int, _Read]]:
    """Yield the size at which each read that grows with the size is expected to be beyond its table."""
    for key, read in now.reads.items():
        grown = read.last - before.reads.get(key, read).last
        if grown > 0:
            more = -(-(read.rows - read.last) * (now.size - before.size) // grown)
            yield now.size + max(-(-more // step), 1) * step, read


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in a run what operators read of tensors by row, and the bytes of all results."""

    def __init__(self, run: _Run, names: Mapping[int, str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._names = run, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator after its reads are recorded."""
        kwargs = kwargs or {}
        for source, dim, last in _selected(func.overloadpacket.__name__, args, kwargs):
            self._record(func.overloadpacket.__name__, source, source.shape[dim], last)
        result = func(*args, **kwargs)
        tensors = (item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor))
        self._run.results += [item.numel() * item.itemsize for item in tensors]
        return result

    def _record(self, name: str, source: torch.Tensor, rows: int, last: int) -> None:
        address = source.untyped_storage().data_ptr() if source.layout is torch.strided else 0
        table = f"'{self._names[address]}'" if address in self._names else "a tensor"
        known = self._run.reads.get((name, table, rows))
        if known is None:
            place = _line()
            self._run.reads[name, table, rows] = _Read(table, rows, last, place.short if place else "")
        elif known.last < last:
            self._run.reads[name, table, rows] = replace(known, last=last)


def _selected(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int, int]]:
    """Return the tensors that an operator selects from, with the dimension and the largest index."""
    if name == "embedding":
        return [(args[0], 0, last) for last in _largest(args[1])]
    if name in ("index_select", "gather"):
        return [(args[0], args[1], last) for last in _largest(args[2])] if args[0].ndim else []
    if name == "index":
        # Indices without values keep their dimension; a mask covers as many as it has.
        found, dim = [], 0
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            found += [] if index is None or is_mask else [(args[0], dim, last) for last in _largest(index)]
            dim += index.ndim if is_mask else 1
        return found
    if name == "slice":
        source, dim, _, end = (*args, *(0, None, None)[len(args) - 1 :])[:4]
        return [(source, dim, end - 1)] if isinstance(end, int) and 0 < end < 1 << 62 else []
    if name == "select":
        return [(args[0], args[1], args[2])]
    return []


def _largest(index: torch.Tensor) -> list[int]:
    return [int(index.max())] if index.numel() else []


def _line() -> Place | None:
    """Return the innermost line of the model's code that is being run."""
    frames: list[Place] = []
    for frame, line in traceback.walk_stack(None):
        if Path(frame.f_code.co_filename) == Path(program.__file__):
            break
        frames.append(Place(frame.f_code.co_filename, line, frame.f_code.co_name))
    return innermost(reversed(frames))
