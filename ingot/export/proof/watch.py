"""Observation of the operators that a module runs: its conditions on values, and the numbers in them."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.errors import ExportError
from ingot.export.torch_internals import TorchDispatchMode
from ingot.tensors import Array

# Files whose frames are not the user's code.
_LIBRARIES = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
# Elements of a tensor whose values are looked up one by one in the inputs, or compared with another tensor.
_MOST = 1 << 16
# Numbers of one tensor that count as constants of the model.
_CONSTANTS = 8
# A constant that is added, or a lower bound, is an epsilon up to this.
EPSILON = 1e-3
# The distance from a constant, relative to it, within which values on both sides are wanted.
NEAR = 0.04

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_BOUNDS = {"clamp": ("min", "max"), "hardtanh": ("min_val", "max_val"), "clamp_min": ("min",), "clamp_max": ("", "max")}
_SELECTIONS = {"where": 0, "masked_fill": 1, "masked_select": 1, "nonzero": 0, "index": 1, "any": 0, "all": 0}
# Operators that change their form at some values of an argument: where these are, if they are not arguments too.
_FORMS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("relu", "leaky_relu", "abs", "sign", "sgn", "elu", "logical_not", "prelu", "copysign"), ()),
    **dict.fromkeys(("hardswish", "hardsigmoid"), (-3, 3)),
    **dict.fromkeys(("round", "floor", "ceil", "trunc", "frac", "argmax", "argmin", "max", "min"), ()),
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "div", "atan2"), ()),
    **dict.fromkeys(("remainder", "fmod", "floor_divide", "bucketize", "searchsorted"), ()),
    **dict.fromkeys(("threshold", "hardshrink", "softshrink", "huber_loss", "smooth_l1_loss"), ()),
    "softplus": (20,),
    "hardtanh": (-1, 1),
    "log1p": (-1,),
    "logit": (0, 1),
}
_STEPS = {"remainder", "fmod", "floor_divide"}
_NONFINITE = {"isnan", "isinf", "isfinite", "isposinf", "isneginf", "nan_to_num"}
_NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "var", "std", "linalg_vector_norm", "rsqrt"}
_UNORDERED = {"topk", "sort", "median", "nanmedian", "mode", "kthvalue", "_unique2", "unique_dim"}
_SHAPES_ONLY = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "new_zeros", "new_ones", "new_full"}


@dataclass(frozen=True)
class Condition:
    """One condition of a module on values, over all runs so far.

    Attributes:
        text: the operator and its number.
        place: the line of the user's code, such as ``x > 500 (model.py:12)``, or empty.
        number: what the values are compared with; None if that is not a constant.
        kind: ``compares``, or ``selects`` for a tensor of booleans that selects.
        low: the smallest difference of a value from the number.
        high: the largest difference.
        below: the difference closest to 0 of those below.
        above: that of those above.
        equal: whether a value was equal.
        none: whether in some run no value was above the number.
    """

    text: str
    place: str
    number: float | None
    kind: str
    low: float = np.inf
    high: float = -np.inf
    below: float = -np.inf
    above: float = np.inf
    equal: bool = False
    none: bool = False

    def joined(self, other: Condition) -> Condition:
        """Return the observations of two runs."""
        return replace(
            self,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            below=max(self.below, other.below),
            above=min(self.above, other.above),
            equal=self.equal or other.equal,
            none=self.none or other.none,
        )

    @property
    def crossed(self) -> bool:
        """Whether values on both sides were seen."""
        if self.kind == "selects":
            return self.high > 0 and self.none
        if self.text[:2] in ("==", "!="):
            return self.equal and (self.low < 0 or self.high > 0)
        if self.text[:2] in (">=", "< "):
            return self.low < 0 and (self.high > 0 or self.equal)
        return self.high > 0 and (self.low < 0 or self.equal)

    @property
    def guards(self) -> bool:
        """Whether it only keeps a divisor from being 0."""
        return self.number is not None and 0 < abs(self.number) <= EPSILON

    @property
    def near(self) -> bool:
        """Whether values close to the number were seen on both sides, where that is a matter of degree."""
        if self.kind == "selects" or not self.number or self.text[:2] in ("==", "!="):
            return self.crossed
        reach = NEAR * abs(self.number)
        return self.crossed and self.above <= reach and self.below >= -reach


@dataclass
class Seen:
    """The observations of one run.

    Attributes:
        conditions: the conditions by operator, number and place.
        numbers: for each input that an operator reads unchanged, the numbers at which the operator changes its form.
        places: the elements of these inputs that such operators read.
        steps: those of the numbers whose multiples matter.
        paired: pairs of inputs that are compared with each other.
        nonfinite: inputs whose NaNs and infinities the module handles.
        normalizes: whether small or equal values matter.
        unordered: whether the order of equal values is not defined.
        reads: whether a value becomes a number of Python or a size.
    """

    conditions: dict[tuple[str, str], Condition] = field(default_factory=dict)
    numbers: dict[str, dict[float, None]] = field(default_factory=dict)
    places: dict[str, Array] = field(default_factory=dict)
    steps: set[float] = field(default_factory=set)
    paired: set[tuple[str, str]] = field(default_factory=set)
    nonfinite: set[str] = field(default_factory=set)
    normalizes: bool = False
    unordered: bool = False
    reads: bool = False


class OperatorLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a run that calls too many operators, such as one whose loop never ends on the inputs.

    Args:
        most: the operators after which the run raises ExportError.
    """

    def __init__(self, most: int = 20_000):
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._most = most

    @property
    def exceeded(self) -> bool:
        """Whether the run was ended."""
        return self.count > self._most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run an operator."""
        self.count += 1
        if self.exceeded:
            raise ExportError(f"the model calls more than {self._most:,} operators")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what operators do with values that depend on inputs.

    Args:
        inputs: the inputs of the run.
        tensors: the same as tensors, in the same order.
    """

    def __init__(self, inputs: Mapping[str, Array], tensors: Sequence[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Seen()
        self._inputs = inputs
        for name, tensor in zip(inputs, tensors, strict=True):
            _mark(tensor, frozenset([name]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; its result depends on the inputs that its arguments depend on."""
        kwargs = kwargs or {}
        sources = frozenset[str]().union(*(_sources(item) for item in _tensors((*args, *kwargs.values()))))
        if sources:
            name = func.overloadpacket.__name__.rstrip("_")
            if name not in _SHAPES_ONLY:
                self._look(name, args, kwargs, func)
                result = func(*args, **kwargs)
                for tensor in _tensors(result if isinstance(result, list | tuple) else (result,)):
                    _mark(tensor, sources)
                return result
        return func(*args, **kwargs)

    def _look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], func: Any) -> None:
        seen = self.seen
        if name in _COMPARISONS:
            self._compare(_COMPARISONS[name], args[0], args[1])
        elif name in _BOUNDS:
            for place, key in enumerate(_BOUNDS[name], 1 if name != "clamp_max" else 0):
                bound = args[place] if len(args) > place else kwargs.get(key)
                if bound is not None and key:
                    self._compare(f"{name} at", args[0], bound)
        elif name in _SELECTIONS and len(args) > _SELECTIONS[name]:
            chosen = args[_SELECTIONS[name]]
            for tensor in chosen if isinstance(chosen, list | tuple) else [chosen]:
                if torch.is_tensor(tensor) and tensor.dtype is torch.bool and _sources(tensor):
                    kind = "compares" if name in ("where", "masked_fill", "any", "all") else "selects"
                    self._record(name, kind, None, tensor.double() - 0.5)
        elif name in _FORMS or name in _NONFINITE:
            self._form(name, args, kwargs)
        elif name in ("add", "sub") and type(args[1]) is float and 0 < abs(args[1]) <= EPSILON:
            seen.normalizes = True
            self._direct(args[0], [args[1], -args[1], 0.0])
        elif name == "_to_copy" and args[0].is_floating_point() and not _is_float(kwargs.get("dtype")):
            self._direct(args[0], [])
        seen.normalizes = seen.normalizes or name in _NORMS
        seen.unordered = seen.unordered or (name in _UNORDERED and not str(func).endswith(".stable"))
        seen.reads = seen.reads or name in ("_local_scalar_dense", "repeat_interleave")

    def _compare(self, text: str, left: Any, right: Any) -> None:
        if not torch.is_tensor(left) or (torch.is_tensor(right) and max(left.numel(), right.numel()) > _MOST):
            return
        numbers = _constants(right)
        if not _sources(left):  # 0 < x
            left, right, numbers = right, left, _constants(left)
            text = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(text, text)
        if not torch.is_tensor(left) or left.dtype.is_complex:
            return
        self._record(text, "compares", numbers[0] if len(numbers) == 1 else None, left.double() - right)
        self._direct(left, numbers)
        if torch.is_tensor(right) and (others := _sources(right)):
            self._direct(right, [])
            self.seen.paired.update((one, other) for one in _sources(left) for other in others if one != other)
        small = [number for number in numbers if 0 < abs(number) <= EPSILON]
        self.seen.normalizes = self.seen.normalizes or bool(small)

    def _form(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        numbers = [*_FORMS.get(name, ()), *(item for item in (*args, *kwargs.values()) if type(item) in (int, float))]
        tensors = list(_tensors(args))
        if name in ("bucketize", "searchsorted"):
            numbers += [number for tensor in tensors if not _sources(tensor) for number in _constants(tensor)]
        steps = name in _STEPS or (name == "div" and kwargs.get("rounding_mode"))
        if steps:
            self.seen.steps.update(number for number in numbers if number)
        elif name in ("argmax", "argmin", "max", "min", "pow"):
            numbers = []  # axes and exponents
        for tensor in tensors[1:] if name == "div" and not steps and len(tensors) > 1 else tensors:
            for source in self._direct(tensor, [*numbers, *(-number for number in numbers)]):
                if name in _NONFINITE:
                    self.seen.nonfinite.add(source)

    def _record(self, text: str, kind: str, number: float | None, difference: torch.Tensor) -> None:
        if not difference.numel():
            return
        difference = difference[~difference.isnan()] if difference.isnan().any() else difference
        shown = text if number is None else f"{text} {number:.6g}"
        place = _place()
        now = Condition(shown, place, number, kind)
        if difference.numel():
            low, high = float(difference.min()), float(difference.max())
            below, above = difference[difference < 0], difference[difference > 0]
            now = replace(
                now,
                low=low,
                high=high,
                below=float(below.max()) if below.numel() else -np.inf,
                above=float(above.min()) if above.numel() else np.inf,
                equal=bool((difference == 0).any()),
                none=high <= 0,
            )
        earlier = self.seen.conditions.get((shown, place))
        self.seen.conditions[shown, place] = now if earlier is None else earlier.joined(now)

    def _direct(self, tensor: Any, numbers: Sequence[float]) -> Iterator[str] | list[str]:
        """Record numbers of the inputs whose values an operator reads unchanged, and return the names of these."""
        if not torch.is_tensor(tensor) or not 0 < tensor.numel() <= _MOST or tensor.dtype.is_complex:
            return []
        found = []
        for name in _sources(tensor):
            own = self._inputs[name]
            if own.size > _MOST or own.dtype == object or tensor.is_floating_point() is (own.dtype.kind in "iub"):
                continue
            values = own.astype(np.float64)
            read = tensor.detach().double().numpy()
            places = np.isin(values, read)
            if own.dtype.kind == "b" or np.isin(read, values).mean() <= 0.9:
                continue
            found.append(name)
            self.seen.numbers.setdefault(name, {}).update(dict.fromkeys(map(float, numbers)))
            self.seen.places[name] = self.seen.places.get(name, np.zeros_like(places)) | places
        return found


def _mark(tensor: torch.Tensor, sources: frozenset[str]) -> None:
    tensor._ingot_sources = sources | _sources(tensor)  # type: ignore[attr-defined]


def _sources(value: Any) -> frozenset[str]:
    """Return the inputs that a value depends on."""
    return getattr(value, "_ingot_sources", frozenset())


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _constants(value: Any) -> list[float]:
    if isinstance(value, bool | int | float):
        return [float(value)]
    if torch.is_tensor(value) and not _sources(value) and 0 < value.numel() <= _MOST and not value.dtype.is_complex:
        return list(map(float, np.unique(value.detach().double().numpy())[:_CONSTANTS]))
    return []


def _is_float(dtype: Any) -> bool:
    return dtype is None or dtype.is_floating_point


def _place() -> str:
    """Return the line of the user's code that is running, and where it is; empty if a library's module runs alone."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            line = " ".join(linecache.getline(file, frame.f_lineno).split())
            return f"{line if len(line) <= 60 else line[:57] + '...'} ({Path(file).name}:{frame.f_lineno})"
        if file.endswith("ingot/export/program.py"):
            break
        frame = frame.f_back
    return ""
