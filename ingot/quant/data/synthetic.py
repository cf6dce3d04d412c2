"""Generated inputs, for models without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.quant.data.samples import Samples
from ingot.quant.data.sources.collect import Source, collect
from ingot.tensors import Array, DType, Signature, TensorSpec

_SIZE = 16  # of a dynamic dimension without a known example


def synthetic(signature: Signature, rows: int, seed: int = 0, examples: Sequence[Mapping[str, Array]] = ()) -> Samples:
    """Return generated inputs.

    Args:
        signature: the model's signature.
        rows: their number.
        seed: the same seed produces the same inputs.
        examples: inputs that the model is known to accept, such as those of an archive's goldens. Generated rows have
            their sizes; floating-point values have their mean and deviation and stay within their range; integers are
            drawn from theirs; flags (only 0 and 1, such as a mask) and text are copied from an example. Without
            examples, floating-point values are standard normal and all others 0 or 1, or one short text. All are
            within the ranges of values that the signature declares.
    """
    rng = np.random.default_rng(seed)
    rows = max(rows, signature.range(signature.batch).low if signature.batch else 1)
    if not examples:
        examples = [_plain(signature, rng) for _ in range(rows)]
        changed = examples
    else:
        known = {spec.name: _Values([example[spec.name] for example in examples]) for spec in signature.inputs}
        changed = [
            {name: known[name].vary(array, rng) for name, array in _case(signature, examples, rng).items()}
            for _ in range(rows)
        ]
    items = ((f"generated input {number}", case) for number, case in enumerate(changed))
    groups, notes = collect(signature, Source(items, bounded=True), "the generated data", rows)
    return Samples(signature, groups, purpose="generated data", notes=notes)


class _Values:
    """The known properties of one input's values."""

    def __init__(self, arrays: Sequence[Array]):
        self.dtype = DType.of(arrays[0])
        self.flags = self.dtype in (DType.BOOL, DType.BYTES)
        values = np.concatenate([array.reshape(-1) for array in arrays])
        if self.dtype.is_float:
            values = values.astype(np.float64)
            values = values[np.isfinite(values)]
            self.mean, self.deviation = (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)
        elif not self.flags:
            self.flags = bool(np.isin(values, (0, 1)).all())
        self.values = values

    def vary(self, array: Array, rng: np.random.Generator) -> Array:
        if self.flags or not self.values.size:
            return array
        if not self.dtype.is_float:
            return rng.choice(self.values, array.shape)
        drawn = rng.normal(self.mean, self.deviation, array.shape)
        return np.clip(drawn, self.values.min(), self.values.max()).astype(self.dtype.numpy)


def _case(signature: Signature, examples: Sequence[Mapping[str, Array]], rng: np.random.Generator) -> dict[str, Array]:
    """Return one row of one example, both drawn at random."""
    example = examples[int(rng.integers(len(examples)))]
    case = {spec.name: example[spec.name] for spec in signature.inputs}
    if signature.batch is None:
        return case
    axes = signature.batch_axes(signature.inputs)
    first = next(iter(axes))
    row = rng.integers(case[first].shape[axes[first]])
    return {name: array.take([row], axes[name]) if name in axes else array for name, array in case.items()}


def _plain(signature: Signature, rng: np.random.Generator) -> dict[str, Array]:
    sizes = {
        symbol: 1 if symbol == signature.batch else signature.range(symbol).nearest(_SIZE)
        for symbol in signature.symbols
    }
    return {
        spec.name: _draw(spec, tuple(sizes.get(str(dim), dim) for dim in spec.shape), rng) for spec in signature.inputs
    }


def _draw(spec: TensorSpec, shape: tuple[int | str, ...], rng: np.random.Generator) -> Array:
    sizes = [int(size) for size in shape]
    if spec.values is not None:
        return spec.values.draw(rng, sizes, spec.dtype.numpy)
    if spec.dtype.is_float:
        return rng.standard_normal(sizes).astype(spec.dtype.numpy)
    if spec.dtype is DType.BYTES:
        return np.full(sizes, b"a", dtype=object)
    return rng.integers(0, 2, sizes).astype(spec.dtype.numpy)
