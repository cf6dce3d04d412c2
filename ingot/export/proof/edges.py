"""Inputs for the proof that are chosen for what a module does: values at which it decides, or changes its form.

A module is observed while it runs (:mod:`ingot.export.proof.watch`). Where an operator reads an input unchanged, the
input gets the operator's numbers, the next values on both sides, zeros, halves and multiples. For conditions on values
that are computed, inputs are searched that take the other side, first with large steps, then by bisection.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ingot import foreign
from ingot.errors import ExportError
from ingot.export import torch_internals
from ingot.export.program import Eager
from ingot.export.proof.examples import MOST_WORK, Edge, Examples
from ingot.export.proof.extremes import WIDE
from ingot.export.proof.watch import Condition, OperatorLimit, Seen, Watch
from ingot.tensors import Array

# Values at which many operators change their form.
_COMMON = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 2.0, 3.0, 1e-8, 20.0)
_INTEGERS = (0, 1, 2, 3, 7, 100, -1, -2, -7)
# Values of flags that may be numbers.
_COUNTS = [0.0, 1.0, 2.0, 3.0, 7.0]
_MULTIPLES = (1, 2, 3, -1, -2, 0.5)
# Values on which kernels differ: a difference there is noted.
_SPECIAL = (np.inf, -np.inf, np.nan, 1e-38, -1e-38)
_NONFINITE = (np.nan, np.inf, -np.inf)
# Factors of samples for operators that treat small values in another way.
_SMALL = (0.0, 1e-3, 1e-5, 1e-7, 1e-2, 1e-9, 1e-12)
# Values above and below these are in separate cases: an error is judged by the largest value of an output.
_LARGE, _TINY = 100.0, 1e-4
# The largest integers that are tried where they may be sizes or numbers of steps.
_COUNTABLE = 100
# Samples in the cases of chosen values, and the most cases with values of one magnitude.
_SAMPLES = 16
_CASES = 3
# Steps of the search for the other side of a condition, and how often it bisects; the most conditions in the search.
_LEVELS = (0, 1, -1, 10, -10, 100, -100, 1e3, -1e3, 1e4, -1e4, 1e6, -1e6)
_FACTORS = (0, 1e-6, 1e-3, 0.1, 10, 100, 1e3, 1e4, 1e6, -1, -100)
_BISECTIONS = 12
# The differences between elements that a search changes together, relative to their size.
_UNEVEN = 0.02
_SEARCHED = 8
# Operators that any run may call, and how many times those of the first run another may call.
_ENDLESS, _LONGER = 20_000, 20

_UNOBSERVED = "its operators could not be observed, so no inputs were chosen for the numbers that they compare with"

_Family = Callable[[float], dict[str, Array]]


@dataclass
class _Search:
    """The module, its examples, and what runs have shown: those on inputs that are kept, and all.

    ``most`` is the number of operators that a run may call: values can make a loop endless.
    """

    eager: Eager
    examples: Examples
    shown: dict[tuple[str, str], Condition] = field(default_factory=dict)
    tried: dict[tuple[str, str], Condition] = field(default_factory=dict)
    most: int = sys.maxsize

    def run(self, inputs: Mapping[str, Array], *, keep: bool = False) -> Seen | None:
        """Observe a run, or return None if the module rejects the inputs."""
        watches: list[Watch] = []

        def within(tensors: Sequence[torch.Tensor]) -> Watch:
            watches.append(Watch({name: inputs[name] for name in self.eager.names}, tensors))
            return watches[0]

        limit = OperatorLimit(self.most)
        try:
            with limit:
                self.eager.run(inputs, within)
        except ExportError:
            return None
        self.most = min(self.most, _ENDLESS + _LONGER * limit.count)
        seen = watches[0].seen
        for known in (self.shown, self.tried) if keep else (self.tried,):
            for key, condition in seen.conditions.items():
                known[key] = condition if key not in known else known[key].joined(condition)
        return seen

    @property
    def missing(self) -> list[tuple[str, str]]:
        """The conditions of which no kept run has shown both sides, close to the number."""
        return [key for key, item in self.shown.items() if not (item.near or item.guards)][:_SEARCHED]


def chosen(eager: Eager, examples: Examples) -> tuple[Examples, list[str]]:
    """Return examples with further cases, and notes on conditions of the module that none of them takes both ways."""
    if eager.device.type != "cpu":
        return examples, []
    search = _Search(eager, examples)
    found = foreign.attempt(lambda: _chosen(search))
    if found is None:
        torch_internals.forget_compiled()
        return examples, [_UNOBSERVED]
    return examples.with_edges(found), list(_notes(search))


def _chosen(search: _Search) -> list[Edge] | None:
    """Return cases with chosen values; None if the module does not run under observation, as with torch.cond."""
    examples = search.examples
    first = search.run(base := examples.make(examples.default_sizes), keep=True)
    if first is None:
        return None
    several = first.numbers or (first.normalizes and _scalable(examples))
    sizes = _enlarged(examples) if several else examples.default_sizes
    if sizes != examples.default_sizes:
        first = search.run(base := examples.make(sizes)) or first
    flags = [name for name in examples.flags if first.numbers.get(name, {}).keys() <= {0, 1} and not first.steps]
    edges = []
    for drawn in (*_direct(examples, base, first, flags), *_small(examples, base, first), *_masked(examples, flags)):
        for inputs in (drawn, examples.fitted(_nonnegative(drawn))):  # a negative index is rejected, for example
            if (seen := search.run(inputs, keep=True)) is not None:
                edges.append(Edge(inputs, _all_numbers(first), ordered=not seen.unordered))
                break
    for inputs in _extreme(examples, base, first, flags):
        if (seen := search.run(inputs)) is not None and not seen.unordered:
            edges.append(Edge(inputs, extreme=True))
    if search.missing and examples.affordable(examples.default_sizes, MOST_WORK / 100):
        edges += [Edge(inputs, _all_numbers(first)) for inputs in _crossing(search)]
    return edges


def _nonnegative(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.abs(array) if array.dtype.kind == "i" else array for name, array in inputs.items()}


def _all_numbers(seen: Seen) -> tuple[float, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(seen.numbers.values())))


def _enlarged(examples: Examples) -> dict[str, int]:
    """Return the default sizes with more samples, if a call with these takes little."""
    sizes = examples.default_sizes
    for dim in dict.fromkeys(spec.shape[0] for spec in examples.inputs if spec.shape):
        if isinstance(dim, str):
            sizes[dim] = max(sizes[dim], examples.ranges[dim].nearest(_SAMPLES))
    return sizes if examples.affordable(sizes, MOST_WORK / 100) else examples.default_sizes


def _direct(
    examples: Examples, base: Mapping[str, Array], seen: Seen, flags: Collection[str]
) -> Iterator[dict[str, Array]]:
    """Yield inputs with chosen values in the places that operators read unchanged."""
    rng = np.random.default_rng(11)
    names = [name for name in seen.numbers if name not in examples.states]
    groups = {
        name: [_COUNTS] if name in flags else _magnitudes(list(_values(examples, base[name], seen, name)))
        for name in names
    }
    for case in range(max((len(found) for found in groups.values()), default=0)):
        changed = dict(base)
        for name, found in groups.items():
            if case < len(found):
                changed[name] = _placed(base[name], seen.places[name], found[case], rng)
        for one, other in seen.paired:
            if base[one].shape == base[other].shape and base[one].dtype == base[other].dtype:
                equal = rng.random(base[one].shape) < 0.5
                changed[one] = np.where(equal, changed[other], changed[one])
        yield examples.fitted(changed)


def _extreme(
    examples: Examples, base: Mapping[str, Array], seen: Seen, flags: Collection[str]
) -> Iterator[dict[str, Array]]:
    """Yield inputs with values at the ends of their datatype in the places that operators read unchanged."""
    rng = np.random.default_rng(19)
    changed = dict(base)
    for name in seen.numbers:
        kind = base[name].dtype.kind
        if (
            name not in (*flags, *examples.states)
            and not examples.is_limited(name)
            and not (kind in "iu" and seen.reads)
        ):
            values = _ends(base[name].dtype) if kind in "iu" else _SPECIAL
            changed[name] = _placed(base[name], seen.places[name], values, rng)
    if any(changed[name] is not array for name, array in base.items()):
        yield changed


def _ends(dtype: np.dtype[Any]) -> list[int]:
    limits = np.iinfo(dtype)
    return [value for value in (limits.min, limits.max, *WIDE) if limits.min <= value <= limits.max]


def _values(examples: Examples, array: Array, seen: Seen, name: str) -> Iterator[float]:
    numbers = [number for number in seen.numbers[name] if math.isfinite(number)]
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        near = [math.floor(number) + more for number in numbers for more in (0, 1, -1)]
        steps = [int(times * step) for step in seen.steps for times in _MULTIPLES]
        steps += [step + more for step in steps for more in (1, -1)]
        for value in near if examples.is_index(name) else (*near, *steps, *_INTEGERS):
            inside = 0 <= value < examples.limit(name) if examples.is_index(name) else limits.min <= value <= limits.max
            if inside and not (seen.reads and abs(value) > _COUNTABLE):
                yield value
        return
    for number in numbers:
        own = array.dtype.type(number)
        yield from (float(own), float(np.nextafter(own, array.dtype.type(np.inf))))
        yield from (float(np.nextafter(own, array.dtype.type(-np.inf))), number - 1, number + 1, 1.5 * number)
    yield from (times * step for step in seen.steps for times in _MULTIPLES)
    yield from _COMMON
    yield from _NONFINITE if name in seen.nonfinite else ()


def _magnitudes(values: Sequence[float]) -> list[list[float]]:
    """Return values in groups of one magnitude each, those that are not finite last."""
    groups: dict[float, list[float]] = {}
    for value in values:
        if not math.isfinite(value):
            groups.setdefault(math.inf, []).append(value)
        elif abs(value) > _LARGE:
            groups.setdefault(round(math.log10(abs(value))), []).append(value)
        else:
            groups.setdefault(-1 if 0 < abs(value) < _TINY else 0, []).append(value)
    return [groups[key] for key in sorted(groups)][: 2 * _CASES]


def _placed(array: Array, places: Array, values: Sequence[float], rng: np.random.Generator) -> Array:
    """Return an array with values in some places, in as many as there are values, or in most."""
    changed = array.copy()
    free = np.flatnonzero(places)
    rng.shuffle(free)
    most = len(free) if len(free) < 3 else max(len(free) * 3 // 4, 1)
    count = min(most, max(2 * len(values), len(free) // 2))
    changed.reshape(-1)[free[:count]] = _cast(np.resize(np.array(values), count), array)
    return changed


def _cast(values: Array, like: Array) -> Array:
    """Convert values to the datatype of an array; float16 makes large ones infinite."""
    with np.errstate(over="ignore"):
        return values.astype(like.dtype)


def _small(examples: Examples, base: Mapping[str, Array], seen: Seen) -> Iterator[dict[str, Array]]:
    """Yield inputs with samples of zeros, of equal values and of small values."""
    if not (seen.normalizes and _scalable(examples)):
        return
    changed = dict(base)
    for name in _scalable(examples):
        array = base[name]
        factors = np.resize(np.array((1.0, *_SMALL)), len(array)).reshape(-1, *(1,) * (array.ndim - 1))
        changed[name] = (array.astype(np.float64) * factors).astype(array.dtype)
        changed[name][len(_SMALL) + 1 : len(_SMALL) + 2] = 1
    yield examples.fitted(changed)


def _scalable(examples: Examples) -> list[str]:
    specs = (spec for spec in examples.inputs if spec.dtype.is_float and spec.shape)
    return [spec.name for spec in specs if spec.name not in examples.states]


def _masked(examples: Examples, flags: Collection[str]) -> Iterator[dict[str, Array]]:
    """Yield inputs with masks that keep all, the first, the last and every second position, and then none.

    Then samples of several lengths are padded at the end, with both meanings of a mask: models may treat such masks in
    another way than those with gaps. Indices reach both ends of their tables.
    """
    base = examples.make(examples.default_sizes, seed=3)
    limits = {name: examples.limit(name) for name in base if examples.is_index(name)}
    if not flags and not limits:
        return
    changed = dict(base)
    for name, limit in limits.items():
        flat = changed[name].reshape(-1)
        flat[:1], flat[-1:] = limit - 1, 0 if flat.size > 1 else limit - 1
    for name in flags:
        if changed[name].ndim > 1:
            rows = changed[name].reshape(-1, changed[name].shape[-1])
            rows[:] = 1
            rows[1::4, 1:], rows[2::4, :-1], rows[3::4, ::2] = 0, 0, 0
    yield examples.fitted(changed)
    for fill in (0, 1) if flags else ():
        yield examples.fitted({**changed, **{name: np.full_like(base[name], fill) for name in flags}})
    padded = {name: _padding(base[name].shape) for name in flags if base[name].ndim > 1}
    for kept in (True, False) if padded else ():
        drawn = {name: (mask == kept).astype(base[name].dtype) for name, mask in padded.items()}
        yield examples.fitted({**changed, **drawn})


def _padding(shape: Sequence[int]) -> Array:
    """Return a mask that keeps the first positions of each row: all of the first row, one fewer of each further one."""
    *rows, size = shape
    lengths = size - np.arange(math.prod(rows)) % max(size, 1)
    return np.asarray(np.arange(size) < lengths[:, None]).reshape(shape)


def _crossing(search: _Search) -> Iterator[dict[str, Array]]:
    """Yield inputs that take the other side of conditions, or come close to their numbers on both sides."""
    for family, levels in _families(search.examples):
        if not (wanted := search.missing):
            return
        shown = [(level, seen.conditions) for level in levels if (seen := search.run(family(level))) is not None]
        for key in wanted:
            for level in _bisected(search, family, key, shown) if not search.shown[key].near else ():
                search.run(inputs := family(level), keep=True)
                yield inputs


def _bisected(
    search: _Search,
    family: _Family,
    key: tuple[str, str],
    shown: Sequence[tuple[float, Mapping[tuple[str, str], Condition]]],
) -> list[float]:
    """Return the levels closest to a condition's number on both of its sides, or none if it has one side only."""
    sides = sorted((level, _side(conditions[key])) for level, conditions in shown if key in conditions)
    changes = [(one, other) for one, other in itertools.pairwise(sides) if one[1] * other[1] < 0]
    if not changes:
        return []
    (low, side), (high, _) = min(changes, key=lambda pair: abs(pair[0][0]) + abs(pair[1][0]))
    for _ in range(_BISECTIONS):
        if abs(high - low) <= 0.01 * max(abs(high), abs(low)):
            break
        middle = (low + high) / 2
        seen = search.run(family(middle))
        if seen is None or key not in seen.conditions:
            break
        low, high = (middle, high) if _side(seen.conditions[key]) == side else (low, middle)
    return [low, high]


def _side(condition: Condition) -> int:
    if condition.kind == "selects":
        return -1 if condition.none else 1
    return 1 if condition.high > -condition.low else -1


def _families(examples: Examples) -> Iterator[tuple[_Family, Sequence[float]]]:
    """Yield ways to change inputs by one number, and the numbers to try."""
    base = examples.make(examples.default_sizes, seed=5)
    free = [
        spec.name
        for spec in examples.inputs
        if spec.name not in examples.states
        and not examples.is_index(spec.name)
        and (spec.dtype.is_float or (spec.dtype.is_integer and spec.name not in examples.flags))
    ]

    # Not all equal: then a module that returns the wrong one of two elements would be right.
    nearly = {name: 1 + _UNEVEN * np.random.default_rng(13).uniform(-1, 1, base[name].shape) for name in free}

    def filled(names: Sequence[str]) -> _Family:
        return lambda level: examples.fitted(
            {**base, **{name: _cast(level * nearly[name], base[name]) for name in names}}
        )

    def scaled(level: float) -> dict[str, Array]:
        return examples.fitted(
            {**base, **{name: _cast(base[name].astype(np.float64) * level, base[name]) for name in free}}
        )

    if free:
        yield filled(free), _LEVELS
        yield scaled, _FACTORS
    for name in free if 1 < len(free) <= _CASES else ():
        yield filled([name]), _LEVELS


def _notes(search: _Search) -> Iterator[str]:
    noted = set[str]()
    for key, condition in search.shown.items():
        tried = search.tried[key]
        varies = condition.number is None or tried.low < tried.high  # otherwise it compares sizes
        if condition.place not in {"", *noted} and varies and not (condition.crossed or condition.guards):
            noted.add(condition.place)
            yield _note(tried)


def _note(condition: Condition) -> str:
    line, _, place = condition.place.rpartition(" (")
    if condition.number is None:
        return f"no input took both sides of '{condition.text}' in `{line}` ({place}"
    low, high = condition.low + condition.number, condition.high + condition.number
    return f"no input crossed '{condition.text}' in `{line}` ({place}: the values were from {low:.4g} to {high:.4g}"
