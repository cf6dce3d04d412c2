"""Between a model's own values and tensors: lists, dicts and arrays of a batch, or the values of one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, ModelFailed
from ingot.runtime.engines.python.interface import Interface
from ingot.tensors import Array, DType, TensorSpec

Failures = dict[int, Exception]
"""The exceptions that a model returned for samples, by their indices."""


def batch_of(interface: Interface, inputs: Mapping[str, Array]) -> Any:
    """Return the argument of ``predict``.

    Raises:
        InvalidArgument: a text is not valid UTF-8.
    """
    found = {name: _passed(interface, name, array) for name, array in inputs.items()}
    return next(iter(found.values())) if interface.bare else found


def samples_of(interface: Interface, inputs: Mapping[str, Array]) -> list[Any]:
    """Return the arguments of ``predict_one``; for a sample whose text is not valid UTF-8, the error."""
    count = len(next(iter(inputs.values())))
    found: list[Any] = []
    for index in range(count):
        try:
            sample = {name: _passed(interface, name, array[index : index + 1])[0] for name, array in inputs.items()}
        except InvalidArgument as error:
            found.append(error)
            continue
        found.append(next(iter(sample.values())) if interface.bare else sample)
    return found


def _passed(interface: Interface, name: str, array: Array) -> Any:
    if name not in interface.lists:
        return array
    values = array.tolist()
    return _decoded(name, values) if name in interface.texts else values


def _decoded(name: str, values: Any) -> Any:
    if isinstance(values, list):
        return [_decoded(name, value) for value in values]
    try:
        return values if isinstance(values, str) else values.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a text of input '{name}' is not valid UTF-8: {error}") from None


def tensors_of(
    specs: Sequence[TensorSpec], result: Any, count: int | None, where: str
) -> tuple[dict[str, Array], Failures]:
    """Return the tensors of a batch that a model returned, and the exceptions that it returned for samples.

    Args:
        specs: the tensors that it must return.
        result: a dict of arrays or lists by name; or a list with a dict or an exception for each sample. With one
            tensor, the dicts may be left out.
        count: the number of samples; None for any.
        where: the method, for messages.

    Raises:
        ModelFailed: the result has another number of samples, or another tensor, datatype or shape.
    """
    columns, failures = _columns(specs, result, where)
    names = [spec.name for spec in specs]
    if {*columns} != {*names}:
        raise ModelFailed(f"{where} returned {_listed(columns)}, but the model's signature has {_listed(names)}")
    count = count if count is not None else max(map(len, columns.values()))
    for name, column in columns.items():
        if len(column) != count:
            raise ModelFailed(f"{where} returned {len(column)} results in '{name}' for {count} samples")
        if not isinstance(column, np.ndarray):
            failures.update({at: value for at, value in enumerate(column) if isinstance(value, Exception)})
    return {spec.name: _tensor(spec, columns[spec.name], failures, where) for spec in specs}, failures


def _columns(specs: Sequence[TensorSpec], result: Any, where: str) -> tuple[dict[str, Any], Failures]:
    """Return the values of each tensor, by sample."""
    if isinstance(result, Mapping):
        return {str(name): _sequence(name, column, where) for name, column in result.items()}, {}
    rows = _sequence("the result", result, where)
    if isinstance(rows, np.ndarray) or not any(isinstance(row, Mapping) for row in rows):
        if len(specs) > 1 and (isinstance(rows, np.ndarray) or not all(isinstance(row, Exception) for row in rows)):
            raise ModelFailed(f"{where} returned values without names; return a dict with {_listed(_names(specs))}")
        return dict.fromkeys(_names(specs), rows), {}
    failures = {at: row for at, row in enumerate(rows) if isinstance(row, Exception)}
    for at, row in enumerate(rows):
        if at not in failures and (not isinstance(row, Mapping) or {*row} != {*_names(specs)}):
            found = _listed(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ModelFailed(
                f"{where} returned {found} for sample {at}, but the model's signature has {_listed(_names(specs))}"
            )
    return {name: [row if at in failures else row[name] for at, row in enumerate(rows)] for name in _names(specs)}, {
        **failures
    }


def _sequence(name: object, column: Any, where: str) -> Any:
    if isinstance(column, list | tuple | np.ndarray):
        return column
    if hasattr(column, "__array__") and len(getattr(column, "shape", [])):
        return np.asarray(column)
    kind = type(column).__name__
    raise ModelFailed(f"{where} returned a {kind} as '{name}', not an array or a list with a value for each sample")


def _tensor(spec: TensorSpec, column: Any, failures: Failures, where: str) -> Array:
    if not failures:
        array = _array(spec, column, where)
    else:
        good = [at for at in range(len(column)) if at not in failures]
        part = _array(spec, [column[at] for at in good], where) if good else None
        shape = part.shape[1:] if part is not None else _sizes(spec)
        array = np.full((len(column), *shape), b"" if spec.dtype is DType.BYTES else 0, spec.dtype.numpy)
        if part is not None:
            array[good] = part
    wanted = spec.shape[1:]
    if array.ndim != len(spec.shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(wanted, array.shape[1:], strict=True)
    ):
        raise ModelFailed(f"{where} returned '{spec.name}' with the shape {list(array.shape)}, declared is {spec}")
    return array


def _array(spec: TensorSpec, column: Any, where: str) -> Array:
    if spec.dtype is DType.BYTES:
        return _texts(spec, column, where)
    try:
        array = np.asarray(column) if len(column) else np.empty((0, *_sizes(spec)), spec.dtype.numpy)
    except (ValueError, TypeError) as error:
        raise ModelFailed(f"{where} returned values in '{spec.name}' that do not form an array: {error}") from error
    if array.dtype == spec.dtype.numpy:
        return np.ascontiguousarray(array)
    listed = not isinstance(column, np.ndarray)  # whose numbers are Python's, which have one size
    if array.dtype.kind not in "biufV" or not (
        np.can_cast(array.dtype, spec.dtype.numpy, "same_kind") or (listed and spec.dtype.is_float)
    ):
        raise ModelFailed(f"{where} returned '{spec.name}' as {_kind(array)}, declared is {spec}; cast it there")
    if listed and spec.dtype.is_integer and array.size:
        limits = np.iinfo(spec.dtype.numpy)
        if array.min() < limits.min or array.max() > limits.max:
            raise ModelFailed(f"{where} returned a number in '{spec.name}' that {spec.dtype.torch_name} cannot hold")
    return array.astype(spec.dtype.numpy)


def _kind(array: Array) -> str:
    return {"U": "text", "S": "bytes", "O": "objects"}.get(array.dtype.kind, str(array.dtype))


def _texts(spec: TensorSpec, column: Any, where: str) -> Array:
    rank = len(spec.shape)
    array = np.empty(len(column), object) if rank == 1 else np.array(column, object)
    if rank == 1:
        array[:] = list(column)
    flat = array.reshape(-1)
    for at, item in enumerate(flat):
        if not isinstance(item, str | bytes):
            raise ModelFailed(f"{where} returned a {type(item).__name__} in '{spec.name}', which holds str or bytes")
        try:
            flat[at] = item.encode() if isinstance(item, str) else bytes(item)
        except UnicodeEncodeError as error:  # half of a pair of surrogates
            raise ModelFailed(f"{where} returned a text in '{spec.name}' that UTF-8 cannot encode: {error}") from None
    return array


def _sizes(spec: TensorSpec) -> list[int]:
    return [dim if isinstance(dim, int) else 0 for dim in spec.shape[1:]]


def _names(specs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
