"""Whether the sizes of a model's inputs bound its work and memory, decided from its graph before it runs.

Start in :func:`bounds_of`; analysis.py walks over the graph, which graph.py reads, with a rule for each operator
(operators/). Serving depends on it, so neither the onnx package nor an engine is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.bounds.abstract import Tensor, UnboundedError, is_sent, limits, sent
from ingot.bounds.analysis import Analysis, Scope, StoppedError
from ingot.bounds.derived import quotient
from ingot.bounds.graph import Model, opened
from ingot.bounds.interval import Interval
from ingot.bounds.poly import ZERO, Poly, Size, TooComplexError
from ingot.bounds.protobuf import DamagedError
from ingot.errors import InvalidArgument
from ingot.tensors import DType, Range, Signature, TensorSpec

__all__ = ["LOOSE", "Bounds", "bounds_of", "excess"]

LOOSE = 10
"""Bounds over this multiple of a call's measured bytes are too loose to limit requests or batches."""
# Fewer bytes do not matter: constants of a few kilobytes are a large part of the smallest calls.
_LEAST_MEASURED = 1 << 14
# The largest number of an archive.
_MOST_BYTES = (1 << 63) - 1

# A call's bytes that do not depend on sizes, such as the tensors that an engine makes while it loads a graph.
_MOST_CONSTANT = 8 << 30
# How often a call may hold the texts of its inputs at once.
_MOST_COPIES = 32


@dataclass(frozen=True)
class Bounds:
    """Whether a graph is bounded, and by what.

    ``reasons`` name each node that is not bounded, and why; a bounded graph has none. ``symbols`` are the named
    dimensions that the bounds refer to.
    """

    reasons: tuple[str, ...]
    symbols: frozenset[str] = frozenset()
    _peak: Poly = ZERO
    _peak_if_empty: Poly = ZERO

    @property
    def bounded(self) -> bool:
        """Whether the sizes of the inputs bound the work and the memory of a call, and no value can end the process."""
        return not self.reasons

    def peak(self, sizes: Mapping[str, int]) -> int:
        """Return an upper bound of the bytes of the tensors that a call of a bounded graph has in memory at once.

        Inputs and weights do not count, nor what the engine's allocator adds by rounding. Bounds above the number that
        an archive can hold are that number.

        Args:
            sizes: of each named dimension of the signature's inputs.
        """
        return min(_MOST_BYTES, (self._peak if all(sizes.values()) else self._peak_if_empty).at(sizes))

    @property
    def formula(self) -> str:
        """The same as text, such as ``8000 + 4096 batch + 48 batch seq^2``, in bytes; empty if it is not bounded."""
        return str(self._peak) if self.bounded else ""


def excess(peak: int, measured: int) -> float:
    """Return how many times the measured bytes of a call its bound is; 0 if they were not measured."""
    return peak / max(measured, _LEAST_MEASURED) if measured else 0.0


def bounds_of(path: Path, signature: Signature | None = None) -> Bounds:
    """Return the bounds of an ONNX file.

    Args:
        path: the graph; its weights are not read.
        signature: its inputs, whose named dimensions the bounds refer to, and whose declared ranges are relied on. By
            default the file's own, with dimensions of any size.
    """
    try:
        with opened(path) as model:
            signature = signature or _declared(model)
            empty = any(signature.range(symbol).low == 0 for symbol in signature.symbols)
            symbols = frozenset(signature.symbols)
            reasons, peak = _analysed(model, signature, empty=False)
            if not empty:
                return Bounds(reasons, symbols, peak)
            # Bounds are much tighter if sizes are at least 1, so calls with an empty input have separate ones.
            more, peak_if_empty = _analysed(model, signature, empty=True)
            return Bounds(reasons or more, symbols, peak, peak_if_empty)
    except (DamagedError, StoppedError, UnboundedError) as error:
        return Bounds((str(error),))
    except TooComplexError:
        return Bounds(("the formula of its memory is too complex",))


def _analysed(model: Model, signature: Signature, *, empty: bool) -> tuple[tuple[str, ...], Poly]:
    """Return the reasons why a model is not bounded, and its peak; ``empty`` lets sizes be 0 where they may."""
    analysis = Analysis(model)
    _, peak = analysis.analyse(model.graph, Scope(dict(inputs_of(model, signature, empty=empty))))
    texts = [(monomial, by) for monomial, by in peak.terms.items() if any(is_sent(name) for name, _ in monomial)]
    if any(monomial[1:] or monomial[0][1] > 1 or by > _MOST_COPIES for monomial, by in texts):
        raise UnboundedError(f"it may need more than {_MOST_COPIES} times the bytes of the texts that a client sends")
    peak = Poly({monomial: by for monomial, by in peak.terms.items() if monomial not in dict(texts)})
    if not analysis.reasons and peak.terms.get((), 0) > _MOST_CONSTANT:
        raise UnboundedError(f"it needs more than {_MOST_CONSTANT >> 30} GiB whatever the sizes of its inputs are")
    return tuple(analysis.reasons), peak


def inputs_of(model: Model, signature: Signature, *, empty: bool) -> dict[str, Tensor]:
    """Return the bounds of a graph's inputs; ``empty`` lets sizes be 0 where they may.

    Raises:
        UnboundedError: the signature lacks an input of the graph.
    """
    tensors = {spec.name: _input(spec, signature, empty=empty) for spec in signature.inputs}
    if any(name not in tensors and name not in model.graph.constants for name in model.graph.inputs):
        raise UnboundedError("it has an input that its signature lacks")
    return tensors


def _declared(model: Model) -> Signature:
    """Return the signature that a file declares; without the inputs that no server accepts."""
    specs = []
    for item in model.inputs:
        with contextlib.suppress(InvalidArgument):  # an engine refuses the file
            specs.append(TensorSpec(item.name, DType.from_onnx(item.kind), item.dims))
    signature = Signature(tuple(specs), ())
    return replace(signature, ranges={name: Range(0) for name in signature.symbols})


def _input(spec: TensorSpec, signature: Signature, *, empty: bool) -> Tensor:
    dims = [_dim(dim, signature, empty=empty) if isinstance(dim, str) else Interval.exactly(dim) for dim in spec.shape]
    each = limits(spec.dtype.onnx)
    if spec.values is not None and spec.dtype.is_integer:
        low, high = (None if end is None else Poly.of(int(end)) for end in (spec.values.low, spec.values.high))
        each = Interval(low or each.low, high or each.high)
    return Tensor.of(spec.dtype.onnx, dims, each=each, text=sent(spec.name) if spec.dtype is DType.BYTES else None)


def _dim(name: str, signature: Signature, *, empty: bool) -> Interval:
    """Return a named dimension; servers refuse sizes outside of its range."""
    sizes = signature.range(name)
    highs = () if sizes.high is None else (Poly.of(sizes.high),)
    if empty and sizes.low == 0:
        return Interval.up_to(Poly.symbol(Size(name, highs=highs)))
    size = Poly.symbol(Size(name, lows=(Poly.of(max(1, sizes.low)),), highs=highs))
    multiple = quotient(size, sizes.step)
    return Interval.exactly(size if multiple is None else multiple.scaled(sizes.step))
