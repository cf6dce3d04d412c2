"""Padding: enlarging inputs along a dimension without changing the outputs, and cutting the outputs back.

A model with a mask, such as BERT, gives the same answer for a sentence of 20 tokens and for the same one with 12 masked
tokens appended. An archive declares each such dimension, and the export proves it; the server then runs requests of
different lengths in one call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument
from ingot.tensors.specs import Array, DType, Signature, TensorSpec

_TEXT = re.compile(r"^(?P<dim>[A-Za-z_]\w*)(:(?P<values>[^@]+))?(@(?P<buckets>[\d,]+))?$")
_MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class Padding:
    """How inputs are enlarged along one named dimension.

    ``values`` has the fill value of every input with the dimension; for a mask, the value that masks. ``buckets`` are
    the target sizes in ascending order; without buckets, or beyond the last one, any size is possible. ``masks`` are
    inputs of which a row must have another value than the fill value: models use a mask that hides every position in
    other ways than one that hides some, so requests with such a row are not padded.
    """

    values: Mapping[str, int | float] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    masks: tuple[str, ...] = ()

    def check(self, dim: str, signature: Signature) -> None:
        """Check that a model's inputs can be padded this way.

        Raises:
            InvalidArgument: the signature lacks the dimension, or it is the batch's; ``values`` do not match the inputs
                that have it or their datatypes; a bucket is not an allowed size.
        """
        if dim == signature.batch or dim not in signature.symbols:
            what = "the batch" if dim == signature.batch else "not a dimension of the inputs"
            known = ", ".join(name for name in signature.symbols if name != signature.batch)
            raise InvalidArgument(f"'{dim}' cannot be padded: it is {what}; there are: {known or 'none'}")
        specs = {spec.name: spec for spec in signature.inputs if dim in spec.shape}
        inputs = [spec.name for spec in signature.inputs]
        for name in self.values:
            if name not in specs:
                what = "which does not have it" if name in inputs else "which is not an input"
                raise InvalidArgument(
                    f"padding of '{dim}' has a value for '{name}', {what}; these have it: {', '.join(specs)}"
                )
        if set(specs) != set(self.values):
            raise InvalidArgument(
                f"padding of '{dim}' needs one value for each input that has it: {', '.join(specs)}; "
                f"it has them for: {', '.join(self.values) or 'none'}"
            )
        for name, value in self.values.items():
            _check_value(specs[name], value)
        if not set(self.masks) <= set(self.values):
            raise InvalidArgument(f"padding of '{dim}' has masks that do not have it: {', '.join(self.masks)}")
        sizes = signature.range(dim)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise InvalidArgument(f"the buckets of '{dim}' are not in ascending order: {self.buckets}")
        for size in self.buckets:
            if not 0 < size < _MAX_SIZE or size not in sizes:
                raise InvalidArgument(f"bucket {size} of '{dim}' is not one of its sizes, {sizes}")


def _check_value(spec: TensorSpec, value: int | float) -> None:
    if spec.dtype is DType.BYTES:
        raise InvalidArgument(f"input '{spec.name}' holds text, which cannot be padded")
    kind = spec.dtype.numpy
    if spec.dtype is DType.BOOL:
        fits = value in (0, 1)
    elif spec.dtype.is_integer:
        bounds = np.iinfo(kind)
        fits = int(value) == value and bounds.min <= value <= bounds.max
    else:
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.float64(value).astype(kind)))
    if not fits:
        raise InvalidArgument(f"{value} cannot pad input '{spec.name}', which is {spec.dtype.torch_name}")
    if spec.values is not None and spec.values.outside(np.array(value, kind)) is not None:
        raise InvalidArgument(f"{value} cannot pad input '{spec.name}', whose values are {spec.values}")


def parse(text: str) -> tuple[str, Padding]:
    """Parse ``dim[:input=value,...][@bucket,...]``, such as ``seq:ids=1@64,128``; see :func:`declared`.

    Raises:
        InvalidArgument: it is not of that form.
    """
    match = _TEXT.match(text.strip())
    problem = f"'{text}' is not a padding; write a dimension, or dim:input=value,... such as seq:ids=1, or seq@64,128"
    if match is None:
        raise InvalidArgument(problem)
    values: dict[str, int | float] = {}
    for item in (match["values"] or "").split(",") if match["values"] else ():
        name, equals, value = item.strip().rpartition("=")
        try:
            values[name] = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:
            raise InvalidArgument(problem) from None
        if not name or not equals or not np.isfinite(values[name]):
            raise InvalidArgument(problem)
    try:
        buckets = tuple(int(size) for size in match["buckets"].split(",")) if match["buckets"] else ()
    except ValueError:
        raise InvalidArgument(problem) from None
    return match["dim"], Padding(values, buckets)


def declared(paddings: Mapping[str, Padding], signature: Signature) -> dict[str, Padding]:
    """Return paddings completed with the value zero for inputs without one.

    Raises:
        InvalidArgument: see :meth:`Padding.check`.
    """
    found = {}
    for dim, given in paddings.items():
        values = {spec.name: 0 for spec in signature.inputs if dim in spec.shape}
        found[dim] = replace(given, values={**values, **given.values})
        found[dim].check(dim, signature)
    return found


class Padder:
    """Pads the inputs of a model and cuts its outputs back.

    Args:
        signature: the model's signature.
        paddings: by dimension; see :meth:`Padding.check`.
    """

    def __init__(self, signature: Signature, paddings: Mapping[str, Padding]):
        self.signature = signature
        self.paddings = paddings
        self.dims = tuple(paddings)
        self._inputs = {spec.name: axes for spec in signature.inputs if (axes := self._axes(spec))}
        self._outputs = {spec.name: axes for spec in signature.outputs if (axes := self._axes(spec))}
        kinds = {spec.name: spec.dtype.numpy for spec in signature.inputs}
        # If an input has two such dimensions, the value of the later one fills the corner.
        self._values = {
            name: kinds[name].type(value) for padding in paddings.values() for name, value in padding.values.items()
        }
        self._first = [
            next((name, axis) for name, axes in self._inputs.items() for at, axis in axes if at == place)
            for place in range(len(self.dims))
        ]

    def _axes(self, spec: TensorSpec) -> list[tuple[int, int]]:
        """Return (index in ``dims``, axis) of a tensor's padded dimensions."""
        return [(self.dims.index(dim), axis) for axis, dim in enumerate(spec.shape) if dim in self.paddings]

    def sizes(self, inputs: Mapping[str, Array]) -> tuple[int, ...]:
        """Return the sizes of the padded dimensions, in the order of ``dims``."""
        return tuple(inputs[name].shape[axis] for name, axis in self._first)

    def target(self, sizes: Iterable[Sequence[int]], *, rounded: bool = False) -> tuple[int, ...]:
        """Return the sizes to pad to so that all requests fit: the largest size, or the bucket above it.

        Args:
            sizes: of the requests.
            rounded: without buckets, round up to an eighth of a power of two, for few distinct sizes.
        """
        return tuple(
            self._up(dim, max(each), rounded) for dim, each in zip(self.dims, zip(*sizes, strict=True), strict=True)
        )

    def _up(self, dim: str, size: int, rounded: bool) -> int:
        larger = next((bucket for bucket in self.paddings[dim].buckets if bucket >= size), None)
        if larger is None and rounded:
            step = max(1, 1 << max(0, size.bit_length() - 4))
            larger = -(-size // step) * step
        # The range of a dimension may end between two steps.
        return larger if larger is not None and larger in self.signature.range(dim) else size

    def hidden(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether a mask hides all positions of a row, so that the inputs must not be padded."""
        for place, dim in enumerate(self.dims):
            for name in self.paddings[dim].masks:
                axis = next(axis for at, axis in self._inputs[name] if at == place)
                if (inputs[name] == self._values[name]).all(axis).any():
                    return True
        return False

    def shape(self, name: str, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an input after padding to ``sizes``."""
        padded = list(shape)
        for place, axis in self._inputs.get(name, ()):
            padded[axis] = sizes[place]
        return tuple(padded)

    def put(self, name: str, array: Array, into: Array) -> None:
        """Copy an input into an array of its padded shape, and fill the rest."""
        if array.shape == into.shape:
            into[...] = array
            return
        into[...] = self._values[name]
        into[tuple(slice(0, size) for size in array.shape)] = array

    def pad(self, inputs: Mapping[str, Array], sizes: Sequence[int]) -> dict[str, Array]:
        """Return inputs padded to ``sizes``."""
        padded = {}
        for name, array in inputs.items():
            shape = self.shape(name, array.shape, sizes)
            if shape == array.shape:
                padded[name] = array
                continue
            padded[name] = np.empty(shape, array.dtype)
            self.put(name, array, padded[name])
        return padded

    def trim(self, inputs: Mapping[str, Array], sizes: Sequence[int]) -> dict[str, Array]:
        """Return inputs without the padding behind ``sizes``."""
        return {
            name: array[tuple(slice(size) for size in self.shape(name, array.shape, sizes))]
            for name, array in inputs.items()
        }

    def cut(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the part of the outputs that belongs to the unpadded inputs."""
        sizes = self.sizes(inputs)
        found = dict(outputs)
        for name, axes in self._outputs.items():
            for place, axis in axes:
                if found[name].shape[axis] > sizes[place]:
                    found[name] = found[name][(slice(None),) * axis + (slice(0, sizes[place]),)]
        return found

    def elements(self, inputs: Mapping[str, Array], sizes: Sequence[int] | None = None) -> int:
        """Return the number of elements of a request's padded inputs, after padding to ``sizes`` if given."""
        total = 0
        for name in self._inputs:
            shape = inputs[name].shape
            total += int(np.prod(shape if sizes is None else self.shape(name, shape, sizes), dtype=np.int64))
        return total


def scattered(parts: Sequence[Array], positions: Sequence[Sequence[int]], axis: int) -> Array:
    """Return the samples of several calls in one array.

    Args:
        parts: the samples of each call; zeros fill the rest of a part that is smaller than another.
        positions: of each part's samples in the result.
        axis: of the samples.
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[axis] = sum(map(len, positions))
    first = parts[0]
    joined = np.full(shape, b"", first.dtype) if first.dtype == object else np.zeros(shape, first.dtype)
    samples = np.moveaxis(joined, axis, 0)
    for part, places in zip(parts, positions, strict=True):
        moved = np.moveaxis(part, axis, 0)
        region: tuple[Any, ...] = (np.array(places), *map(slice, moved.shape[1:]))
        samples[region] = moved
    return joined
