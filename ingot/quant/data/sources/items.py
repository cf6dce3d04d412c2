"""One item of data, which is a mapping, an array or a tuple, as checked rows of inputs and extras."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot import tensors
from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, Range, Signature
from ingot.tensors.arrays import as_bytes

LABELS = "labels"


@dataclass(frozen=True)
class Batch:
    """Rows of one shape, which can share a batch.

    Attributes:
        inputs: by name, exactly the model's.
        extras: all other arrays, such as labels; the first axis is the rows.
        rows: their number.
    """

    inputs: dict[str, Array]
    extras: dict[str, Array]
    rows: int


def name_arrays(signature: Signature, item: object, what: str) -> dict[str, Array]:
    """Return an item's arrays by name.

    Args:
        signature: has the order of inputs without names.
        item: a mapping, a tuple of inputs and perhaps labels, or the only input.
        what: the item's name in messages.

    Raises:
        InvalidArgument: the length of a tuple differs from the number of inputs, or a part of it is not an array.
    """
    names = [spec.name for spec in signature.inputs]
    if isinstance(item, Mapping):
        named = {str(name): value for name, value in item.items()}
    else:
        try:
            parts = list(_flatten(item))
        except RecursionError:
            raise InvalidArgument(f"{what} contains itself, or is nested too deeply; pass arrays") from None
        if len(parts) not in (len(names), len(names) + 1):
            raise InvalidArgument(
                f"{what} has {len(parts)} arrays; the model's inputs are {', '.join(names)}, and one more array "
                "may be the labels; pass a mapping of arrays by name"
            )
        named = dict(zip([*names, LABELS], parts, strict=False))
    arrays = {}
    for name, value in named.items():
        try:
            arrays[name] = to_array(value)
        except (ValueError, TypeError, RuntimeError) as error:  # the last is PyTorch's, as for "meta" tensors
            raise InvalidArgument(f"'{name}' in {what} cannot be converted to an array: {error}") from error
    return arrays


def to_array(value: Any) -> Array:
    """Return an array or tensor as a numpy array in the machine's byte order, text as BYTES."""
    if hasattr(value, "detach"):  # a PyTorch tensor, converted without importing PyTorch
        value = value.detach().cpu()
        # numpy has no native bfloat16, and float32 represents all of its values
        value = value.float().numpy().astype(DType.BF16.numpy) if "bfloat16" in str(value.dtype) else value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "OSU":
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    items = [item.encode() if isinstance(item, str) else item for item in array.reshape(-1).tolist()]
    return as_bytes(items).reshape(array.shape)


def check_item(
    signature: Signature, arrays: Mapping[str, Array], what: str, *, single: bool, finite: bool
) -> Iterator[Batch]:
    """Yield an item's rows: all at once, or case by case for a model without a batch.

    Args:
        signature: the model's signature.
        arrays: the inputs, and others by name.
        what: the item's name in messages.
        single: whether the inputs may be one row without the batch dimension.
        finite: whether NaN and infinity are refused.

    Raises:
        InvalidArgument: an input is missing, empty, not finite, or of another type or shape; an extra has another
            number of rows.
    """
    names = [spec.name for spec in signature.inputs]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise InvalidArgument(f"{what} lacks the input '{missing[0]}'; it contains: {', '.join(arrays) or 'nothing'}")
    inputs = {name: arrays[name] for name in names}
    extras = {name: array for name, array in arrays.items() if name not in inputs}
    for name, array in inputs.items():
        if array.size == 0:
            raise InvalidArgument(f"{what} is empty: '{name}' has shape {list(array.shape)}")
        if finite and not _is_finite(array).all():
            raise InvalidArgument(f"{what} contains NaN or infinity in '{name}'; leave out those rows")
    if signature.batch is None:
        yield from _cases(signature, inputs, extras, what)
        return
    axes = signature.batch_axes(signature.inputs)
    lone = single and all(inputs[spec.name].ndim == len(spec.shape) - (spec.name in axes) for spec in signature.inputs)
    if lone:
        inputs = {name: np.expand_dims(array, axes[name]) if name in axes else array for name, array in inputs.items()}
    bounds = {**signature.ranges, signature.batch: Range()}  # the data is run in batches that the model accepts
    rows = _check(dataclasses.replace(signature, ranges=bounds), inputs, what)[signature.batch]
    yield Batch(inputs, _check_extras(extras, rows, lone, what), rows)


def sound_rows(signature: Signature, batch: Batch) -> Array:
    """Return the indices of the rows without NaN and infinity in any input."""
    axes = signature.batch_axes(signature.inputs) if signature.batch is not None else {}
    sound = np.ones(batch.rows, bool)
    for name, array in batch.inputs.items():
        finite = _is_finite(array)
        if name in axes:
            sound &= np.moveaxis(finite, axes[name], 0).reshape(batch.rows, -1).all(axis=1)
        else:
            sound &= bool(finite.all())  # a shared value affects all rows
    return np.flatnonzero(sound)


def _is_finite(array: Array) -> Array:
    if array.dtype.kind in "biuO" or not DType.of(array).is_float:
        return np.ones(array.shape, bool)
    return np.isfinite(array)


def _cases(
    signature: Signature, inputs: Mapping[str, Array], extras: Mapping[str, Array], what: str
) -> Iterator[Batch]:
    lengths = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    stacked = len(lengths) == 1 and all(inputs[spec.name].ndim == len(spec.shape) + 1 for spec in signature.inputs)
    if not stacked:
        _check(signature, inputs, what)
        yield Batch(dict(inputs), _check_extras(extras, 1, True, what), 1)
        return
    (rows,) = lengths
    extras = _check_extras(extras, rows, False, what)
    for row in range(rows):
        case = {name: np.asarray(array[row], array.dtype) for name, array in inputs.items()}
        _check(signature, case, what)
        yield Batch(case, {name: array[row : row + 1] for name, array in extras.items()}, 1)


def _check(signature: Signature, inputs: Mapping[str, Array], what: str) -> dict[str, int]:
    try:
        return tensors.check_inputs(signature, inputs)
    except InvalidArgument as error:
        raise InvalidArgument(f"{what} does not fit the model: {error}") from None


def _check_extras(extras: Mapping[str, Array], rows: int, single: bool, what: str) -> dict[str, Array]:
    checked = {}
    for name, array in extras.items():
        if single or (array.ndim == 0 and rows == 1):
            checked[name] = array[None]
        elif array.ndim == 0:
            continue  # a single value is unrelated to the rows
        elif len(array) != rows:
            raise InvalidArgument(
                f"{what} has {rows} rows of inputs, but {len(array)} in '{name}'; pass one value per row, or leave "
                "out that array"
            )
        else:
            checked[name] = array
    return checked


def _flatten(item: object) -> Iterator[Any]:
    """Yield the parts of nested tuples, and of lists of arrays; a list of numbers is an array itself."""
    if isinstance(item, tuple) or (isinstance(item, list) and any(hasattr(part, "shape") for part in item)):
        for part in item:
            yield from _flatten(part)
    else:
        yield item
