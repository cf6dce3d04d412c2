"""A user-defined metric."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.data.samples import Samples
from ingot.quant.metric import bootstrap
from ingot.quant.metric.base import Comparison, Metric, Outputs, Score, rows_of
from ingot.tensors import Array, Signature

Column = Array | list[Array]
"""All rows of an output or extra; a list of rows if they have several sizes."""

_OWN = (__file__, foreign.__file__)
_RESAMPLES = 100  # each takes two calls of a function that may be slow


class Function(Metric):
    """The user's ``function(outputs, data)``; higher values are better.

    Args:
        function: called with all rows of the outputs and of the extras by name, rows first; rows of several sizes are
            passed as a list. The arrays cannot be written to. A number is the metric, and the function is called for
            resampled rows too. An array has one value for each independent unit, such as a query: the metric is their
            mean, and the values are resampled. The function's attribute ``groups`` may name the extra that groups rows.
        name: its name in messages and reports.

    Raises:
        InvalidArgument: ``groups`` is not a name.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str):
        self.name = name
        self._function = function
        self.groups = getattr(function, "groups", None)
        if self.groups is not None and not isinstance(self.groups, str):
            raise InvalidArgument(
                f"groups of the metric {name} is of type {type(self.groups).__name__}; it must be the name of an array"
            )

    @property
    def identity(self) -> str:
        """The name, the groups, and a digest of the function's code, without the functions that it calls."""
        name = self.name if self.groups is None else f"{self.name} by {self.groups}"
        code = _code(self._function)
        return name if code is None else f"{name} {hashlib.sha256(_describe(code).encode()).hexdigest()}"

    def check(self, samples: Samples) -> None:
        if self.groups is None:
            return
        try:
            several = samples.groups(self.groups).max() > 0
        except InvalidArgument as error:
            raise InvalidArgument(f"the metric {self.name} needs its groups: {error}") from error
        if not several:
            raise InvalidArgument(
                f"the {samples.purpose}{samples.where} has only one group in '{self.groups}', and the metric "
                f"{self.name} needs several"
            )

    def notes(self, expected: Sequence[Outputs], before: Score, samples: Samples) -> tuple[str, ...]:
        """Note a metric whose rows cannot be resampled."""
        if not math.isnan(before.low):
            return ()
        return (
            f"the metric {self.name} has no 95 % interval: its values on resampled rows are not like that on all "
            "rows. Return an array with a value for each independent unit, or set the function's attribute groups",
        )

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        signature = samples.signature
        extras = {
            name: _column([batch.extras[name] for batch in samples.batches(samples.rows)]) for name in samples.extras
        }
        before, after = (_outputs(batches, signature) for batches in (expected, actual))
        values = [self._call(before, extras), self._call(after, extras)]
        for value, whose in zip(values, ("original", "quantized model"), strict=True):
            self._check_value(value, whose)
        if any(value.ndim for value in values):
            if values[0].shape != values[1].shape:
                raise QuantizationError(
                    f"the metric {self.name} returns {values[0].size} values for the original and {values[1].size} "
                    "for the quantized model; return one for each unit of the data, in the same order"
                )
            return bootstrap.compare(bootstrap.mean(values[0]), bootstrap.mean(values[1]), len(values[0]))
        left, right = (bootstrap.each(self._resampled(outputs, extras)) for outputs in (before, after))
        groups = samples.groups(self.groups) if self.groups is not None else None
        return bootstrap.compare(left, right, samples.rows, _RESAMPLES, groups=groups)

    def _check_value(self, value: Array, whose: str) -> None:
        if value.ndim > 1:
            raise InvalidArgument(
                f"the metric {self.name} returns an array of shape {list(value.shape)}; return a number, or one value "
                "for each independent unit"
            )
        if not np.isfinite(value).all():
            shown = float(value) if not value.ndim else "NaN or infinity in places"
            raise QuantizationError(f"the metric {self.name} of the {whose} is {shown}; it must be a finite number")

    def _call(self, outputs: Mapping[str, Column], extras: Mapping[str, Column]) -> Array:
        """Return a number, as an array without dimensions, or the values of units."""

        def failed(error: Exception) -> str:
            return f"the metric {self.name} failed{_place(error)}: {type(error).__name__}: {error}"

        with foreign.reported_as(InvalidArgument, failed):
            value = self._function(_lent(outputs), _lent(extras))
            found = np.asarray(value, np.float64) if np.ndim(value) else np.asarray(float(value))
        if not found.size:
            raise InvalidArgument(f"the metric {self.name} returns an empty array")
        return found.reshape(()) if found.size == 1 else found

    def _resampled(self, outputs: Mapping[str, Column], extras: Mapping[str, Column]) -> Callable[[Array], float]:
        def measure(index: Array) -> float:
            try:
                return float(self._call(_draw(outputs, index), _draw(extras, index)))
            except InvalidArgument:
                if np.array_equal(index, np.arange(len(index))):
                    raise
                return math.nan  # some resamples may have only one class, for which many metrics are undefined

        return measure


def _place(error: Exception) -> str:
    """Return the file and line of the user's code in which an error arose: the first below the call."""
    frames = [item for item in traceback.extract_tb(error.__traceback__) if item.filename not in _OWN]
    return f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""


def load_function(spec: str) -> Function:
    """Return the metric ``module:function``; the module may be in the current folder.

    Raises:
        InvalidArgument: the module cannot be imported, or has no such function.
    """
    module_name, _, name = spec.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))

    def unloaded(error: Exception) -> str:
        reason = f"{type(error).__name__}: {error}"
        return f"the metric '{spec}' cannot be imported: {reason}; run this in the folder of {module_name}.py"

    with foreign.reported_as(InvalidArgument, unloaded):
        function = getattr(importlib.import_module(module_name), name, None)
    if not callable(function):
        raise InvalidArgument(f"the metric '{spec}' is not a function: there is no callable '{name}' in {module_name}")
    return Function(function, spec)


def _code(function: Any) -> CodeType | None:
    """Return the code of a function or callable object; None if it is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    found = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None


def _describe(constant: object) -> str:
    """Return an identity of code and constants that is the same in every process."""
    if isinstance(constant, CodeType):
        return f"{constant.co_code.hex()} {constant.co_names} {_describe(constant.co_consts)}"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_describe, constant))})"
    if isinstance(constant, frozenset):  # its order differs between processes
        return f"{{{', '.join(sorted(map(_describe, constant)))}}}"
    return repr(constant)


def _outputs(batches: Sequence[Outputs], signature: Signature) -> dict[str, Column]:
    return {spec.name: _column(rows_of(batches, spec.name, signature)) for spec in signature.outputs}


def _column(parts: Sequence[Array]) -> Column:
    if len({part.shape[1:] for part in parts}) == 1:
        return _locked(np.concatenate(parts))
    return [_locked(row) for part in parts for row in part]


def _locked(array: Array) -> Array:
    """Return a read-only view: a change by one call would affect the next."""
    view = array.view()
    view.flags.writeable = False
    return view


def _lent(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return a copy that the user's function may change."""
    return {name: [*column] if isinstance(column, list) else column for name, column in columns.items()}


def _draw(columns: Mapping[str, Column], index: Array) -> dict[str, Column]:
    return {
        name: [column[row] for row in index] if isinstance(column, list) else column[index]
        for name, column in columns.items()
    }
