"""Proof that a lowered model equals its original."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ingot.errors import EngineTimeout, ExportError, IngotError, InvalidArgument, ParityError
from ingot.export.program import NEXT, Runner, ended_if_endless
from ingot.export.proof import draws
from ingot.export.proof.examples import Edge, Examples
from ingot.model_store import Golden, ParityEvidence
from ingot.tensors import Array, DType, Signature, arrays

# The largest error that rounding alone can cause, as a share of the tensor's largest value.
TOLERANCE = {DType.FP64: 1e-8, DType.FP32: 1e-4, DType.FP16: 5e-3, DType.BF16: 4e-2}


def tolerance(signature: Signature, computed: Iterable[DType] = ()) -> float:
    """Return the tolerance of the least exact floating-point datatype; integers must be equal.

    Args:
        signature: the inputs and outputs.
        computed: the datatypes in which the model computes.
    """
    dtypes = {*computed, *(spec.dtype for spec in (*signature.inputs, *signature.outputs))}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=TOLERANCE[DType.FP32])


class Remembered:
    """A runner that keeps its outputs by their inputs, because every stage compares with the original on the same ones.

    Args:
        runner: the original.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._outputs: dict[str, dict[str, Array]] = {}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        digest = hashlib.sha256()
        for name, array in inputs.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(arrays.to_bytes(array))
        key = digest.hexdigest()
        if key not in self._outputs:
            self._outputs[key] = self._runner.run(inputs)
        return self._outputs[key]


def prove(
    reference: Runner,
    candidate: Runner,
    signature: Signature,
    examples: Examples,
    *,
    exact: Runner | None = None,
    most: int | None = None,
    budget: float = 120.0,
    remark: Callable[[str], None] = lambda text: None,
) -> tuple[tuple[ParityEvidence, ...], tuple[Golden, ...]]:
    """Compare two models at every case of ``examples``.

    Args:
        reference: the original.
        candidate: the model that must equal it.
        signature: the signature of both.
        examples: the source of the cases.
        exact: the original in double precision. Four times the rounding error of the original is allowed where that
            is more than the tolerance.
        most: the largest number of cases. Edges are then left out, and dynamic dimensions may have one size only.
        budget: seconds after which no further case begins, except the first three.
        remark: called with a sentence on cases that could not be compared, or that differ at extreme values.

    Returns:
        The worst error of each output, and the first two cases as goldens, with the candidate's outputs.

    Raises:
        ParityError: an output differs by more than the tolerance, or the candidate fails.
        InvalidArgument: the original accepts none of the inputs that were drawn for a needed case.
        ExportError: the original runs at one size only of a dynamic dimension.
    """
    limit = tolerance(signature, examples.computed)
    worst = {spec.name: (0.0, limit) for spec in signature.outputs}
    goldens: list[Golden] = []
    proved: list[Mapping[str, int]] = []
    skipped: list[Mapping[str, int]] = []
    unshared = ""
    states: dict[str, Array] = {}
    slowest = 0.0
    end = time.monotonic() + budget
    for seed, sizes in enumerate(itertools.islice(examples.cases(), most)):
        if len(proved) >= 3 and time.monotonic() > end:
            break
        needed = not proved or not examples.stretched
        undefined = ""  # an output in which the original returns NaN where the candidate returns other values
        for inputs, expected in draws.accepted(reference, examples, sizes, seed, states, needed=needed):
            start = time.monotonic()
            actual = _run(candidate, inputs)
            slowest = max(slowest, time.monotonic() - start)
            wanted = {name: draws.defined(inputs, expected[name], actual[name]) for name in worst}
            errors = {name: _error(name, inputs, wanted[name], actual[name], limit, exact) for name in worst}
            undefined = next((name for name in worst if wanted[name] is not expected[name]), "")
            if not undefined:
                break
            shown = f"returns NaN in '{undefined}' ({_shapes(inputs)}), where the graph returns other values"
            unshared = unshared or shown
        else:
            if undefined and not proved:
                raise ParityError(_report(undefined, math.inf, limit, expected[undefined], actual[undefined], inputs))
            skipped.append(sizes)
            continue
        worst = {name: max(error, errors[name]) for name, error in worst.items()}
        states = {name: expected[f"{name}{NEXT}"] for name in examples.states}  # the next case continues from this one
        proved.append(sizes)
        if len(goldens) < 2:
            goldens.append(Golden(inputs, actual))
    _check_varied(examples, proved, most)
    compared = 0
    for edge in examples.edges if most is None else ():
        if time.monotonic() > end:
            break
        try:
            found = _at_edge(reference, candidate, edge, states, limit, exact, slowest)
        except ParityError as failure:
            if not edge.extreme:
                raise
            remark(f"with infinities, NaN, 1e-38 or the largest integers among the inputs, {failure}")
            continue
        worst = {name: max(error, found.get(name, error)) for name, error in worst.items()}
        compared += bool(found)
    for text in _remarks(unshared, skipped, examples.default_sizes):
        remark(text)
    evidence = tuple(
        ParityEvidence(tensor=name, error=error, tolerance=allowed, cases=len(proved) + compared)
        for name, (error, allowed) in worst.items()
    )
    return evidence, tuple(goldens)


def _remarks(unshared: str, skipped: Sequence[Mapping[str, int]], default: Mapping[str, int]) -> Iterator[str]:
    if unshared:
        yield f"for some of the drawn inputs the model {unshared}; other values were drawn for the comparison"
    shown = [", ".join(f"{dim}={size}" for dim, size in sizes.items() if size != default[dim]) for sizes in skipped]
    if listed := "; ".join(dict.fromkeys(filter(None, shown))):
        yield f"not compared at {listed}: the model is not defined on any inputs that were drawn at these sizes"


def _run(candidate: Runner, inputs: Mapping[str, Array]) -> dict[str, Array]:
    try:
        return candidate.run(inputs)
    except EngineTimeout as failure:
        raise ParityError(f"the exported graph does not end where the model does ({_shapes(inputs)})") from failure
    except IngotError as failure:
        cause = " ".join(str(failure.__cause__ or "").split())[:300]
        raise ParityError(
            f"the exported graph fails where the model does not ({_shapes(inputs)}): {failure}"
            + (f": {cause}" if cause and cause not in str(failure) else "")
        ) from failure


def _at_edge(
    reference: Runner,
    candidate: Runner,
    edge: Edge,
    states: Mapping[str, Array],
    limit: float,
    exact: Runner | None,
    ordinary: float,
) -> dict[str, tuple[float, float]]:
    """Return the error and the tolerance of each output at chosen values, by its name.

    Nothing is returned where the original does not define its outputs, or where rounding decides them.

    Args:
        reference: the original.
        candidate: the graph.
        edge: the case.
        states: the values of states, from an earlier case.
        limit: the tolerance.
        exact: the original in double precision.
        ordinary: the seconds of the graph's slowest call on ordinary values.

    Raises:
        ParityError: an output differs by more than the tolerance.
    """
    inputs = {**edge.inputs, **states}
    try:
        expected = reference.run(inputs)
    except InvalidArgument:  # a later call than the one that accepted these values
        return {}
    actual: dict[str, Array] = {}
    try:
        with ended_if_endless(candidate, ordinary):
            actual = _run(candidate, inputs)
        return {
            name: _error(name, inputs, draws.defined(inputs, value, actual[name]), actual[name], limit, exact)
            for name, value in expected.items()
        }
    except ParityError:
        if not edge.ordered or not _is_certain(reference, exact, edge, inputs, expected, limit):
            return {}
        if actual and _is_amplified(reference, edge, inputs, expected, actual, limit):
            return {}
        raise


def _is_amplified(
    reference: Runner,
    edge: Edge,
    inputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    limit: float,
) -> bool:
    """Return whether the graph differs by at most ten tolerances, and by at most four times the effect of rounding.

    That effect is the difference between the original's outputs at the inputs and at slightly different inputs. It is
    large in a layer that normalizes equal values: the layer divides the rounding error of their mean by nearly 0.
    """
    errors = {
        name: arrays.departure(draws.defined(inputs, expected[name], actual[name]), actual[name]) for name in expected
    }
    if max(errors.values(), default=0.0) > 10 * limit:
        return False
    try:
        other = reference.run({name: _nudged(array, edge.numbers) for name, array in inputs.items()})
    except InvalidArgument:
        return False
    return all(error <= max(limit, 4 * arrays.departure(expected[name], other[name])) for name, error in errors.items())


def _is_certain(
    reference: Runner,
    exact: Runner | None,
    edge: Edge,
    inputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    limit: float,
) -> bool:
    """Return whether rounding does not decide the original's outputs, as is assumed without ``exact``.

    The outputs are then the same in double precision, or if the model does not run in that, at slightly different
    inputs.
    """
    if exact is None:
        return True
    try:
        other = exact.run({name: _unrounded(array, edge.numbers) for name, array in inputs.items()})
    except ExportError:
        try:
            other = reference.run({name: _nudged(array, edge.numbers) for name, array in inputs.items()})
        except InvalidArgument:
            return False
    with np.errstate(over="ignore"):  # values beyond the output's datatype become infinite
        values = [(value, other[name].astype(value.dtype)) for name, value in expected.items()]
    return all(arrays.departure(draws.defined(inputs, value, same), same) <= limit for value, same in values)


def _unrounded(array: Array, numbers: Sequence[float]) -> Array:
    """Return floats in double precision; rounded constants of the model become the constants themselves."""
    if not DType.of(array).is_float:
        return array
    values = array.astype(np.float64)
    for number in numbers:
        values[array == array.dtype.type(number)] = number
    return values


def _nudged(array: Array, numbers: Sequence[float]) -> Array:
    """Return floats that differ from the given ones by a millionth, except 0 and those close to one of the numbers."""
    if not DType.of(array).is_float:
        return array
    values = array.astype(np.float64)
    kept = np.isin(values, (0, *numbers))
    for number in numbers:
        kept |= np.abs(values - number) <= 1e-4 * abs(number)
    noise = np.random.default_rng(17).choice([-1e-6, 1e-6], array.shape)
    return np.where(kept, values, values * (1 + noise)).astype(array.dtype)


def _error(
    name: str, inputs: Mapping[str, Array], expected: Array, actual: Array, limit: float, exact: Runner | None
) -> tuple[float, float]:
    """Return the error of an output and its tolerance.

    Raises:
        ParityError: the error is larger.
    """
    error, allowed = arrays.departure(expected, actual), limit
    if error > limit and np.isfinite(error) and exact is not None:
        allowed = max(limit, 4 * _rounding(exact, inputs, name, expected))
    elif error > 0 and exact is not None and _is_tiny(expected):
        error, allowed = _share_of_tiny(exact, inputs, name, expected, actual, (error, limit))
    if error > allowed:
        raise ParityError(_report(name, error, allowed, expected, actual, inputs))
    return error, allowed


def _check_varied(examples: Examples, proved: Sequence[Mapping[str, int]], most: int | None) -> None:
    """Raise ExportError if the original runs at one size only of a dimension that is declared dynamic."""
    for symbol, size in proved[0].items():
        possible = {sizes[symbol] for sizes in examples.cases()}
        if most is None and len(possible) > 1 and {sizes[symbol] for sizes in proved} == {size}:
            raise ExportError(
                f"the model runs on the example at {symbol}={size} only, so '{symbol}' cannot be proved to be dynamic; "
                "pass a larger example, or declare the dimension as that size"
            )


def unrepeated(runner: Runner, examples: Examples) -> str | None:
    """Run a model on one input, on another, and on the first again; return an output that changed, if any."""
    sizes = examples.default_sizes
    first = examples.make(sizes)
    expected = runner.run(first)
    with contextlib.suppress(InvalidArgument):  # the model may reject values that are not the user's
        runner.run(examples.make(sizes, seed=2))
    again = runner.run(first)
    for name, value in expected.items():
        limit = TOLERANCE.get(DType.of(value), 0.0)
        if arrays.departure(value, again[name]) > limit:
            return name
    return None


def _rounding(exact: Runner, inputs: Mapping[str, Array], name: str, expected: Array) -> float:
    """Return the rounding error of an output of the original, at most 2.5 times the tolerance of its datatype."""
    try:
        value = exact.run(inputs)[name]
    except ExportError:  # the model does not run in double precision
        return 0.0
    own = arrays.departure(value.astype(expected.dtype), expected)
    return min(own, 2.5 * TOLERANCE.get(DType.of(expected), 0.0))


# The smallest value that the error of tiny values is a share of.
_LEAST = 1e-30


def _is_tiny(expected: Array) -> bool:
    return DType.of(expected).is_float and float(np.abs(expected).max(initial=0.0)) < arrays.SCALE_FLOOR


def _share_of_tiny(
    exact: Runner, inputs: Mapping[str, Array], name: str, expected: Array, actual: Array, plain: tuple[float, float]
) -> tuple[float, float]:
    """Return the error and the tolerance of tiny values as a share of their largest, or ``plain`` if unknown.

    Values that are only rounding errors differ from those in double precision by about their own size, so that their
    tolerance is large.
    """
    try:
        value = exact.run(inputs)[name].astype(expected.dtype)
    except ExportError:  # the model does not run in double precision
        return plain
    noise = 4 * arrays.departure(value, expected, floor=_LEAST)
    return arrays.departure(expected, actual, floor=_LEAST), max(plain[1], noise)


def _report(name: str, error: float, limit: float, expected: Array, actual: Array, inputs: Mapping[str, Array]) -> str:
    shapes = _shapes(inputs)
    head = f"the exported graph does not equal the PyTorch model: output '{name}'"
    if expected.shape != actual.shape:
        return f"{head} has shape {list(actual.shape)} instead of {list(expected.shape)} (inputs: {shapes})"
    if expected.dtype != actual.dtype:
        return f"{head} is {actual.dtype} instead of {expected.dtype} (inputs: {shapes})"
    where = _worst_element(expected, actual)
    values = f"{expected[where]!s} became {actual[where]!s} at {[int(index) for index in where]}"
    return f"{head} differs by {error:.2e} of its largest value, tolerance {limit:.0e}; {values} (inputs: {shapes})"


def _shapes(inputs: Mapping[str, Array]) -> str:
    return ", ".join(f"{key} {list(array.shape)}" for key, array in inputs.items())


def _worst_element(expected: Array, actual: Array) -> tuple[np.intp, ...]:
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        gap = np.where(np.isfinite(left) & np.isfinite(right), np.abs(left - right), np.where(same, 0, np.inf))
    return np.unravel_index(int(np.argmax(gap)), gap.shape)
