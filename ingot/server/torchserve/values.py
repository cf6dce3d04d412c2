"""From the values of a request to a model's inputs, and from its outputs to the answers of TorchServe's handlers."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import InvalidArgument, shortened
from ingot.protocol import json_data
from ingot.protocol.requests import InferResponse
from ingot.runtime import Model
from ingot.runtime.engines.python.torchserve.rows import BODY
from ingot.server.torchserve.bodies import DATA, Row, merged, parsed
from ingot.steps import Steps
from ingot.steps.after.classify import Classify
from ingot.tensors import Array, DType, TensorSpec
from ingot.tensors.arrays import as_bytes

# As TorchServe's image_classifier returns them.
_BEST = 5
_JSON_STARTS = b'[{"-0123456789tfn'


class Inputs(NamedTuple):
    """The inputs of a request, and whether they are one sample, whose answer is not in a list."""

    arrays: dict[str, Array]
    alone: bool


def inputs_of(model: Model, row: Row) -> Inputs:
    """Return a model's inputs: raw ones of a model with steps, otherwise its tensors.

    A value is found by the name of its input. One input without a value takes the part ``data`` or the whole body.

    Raises:
        InvalidArgument: a value is missing, unknown, or does not fit its input.
    """
    values = merged(row)
    steps, signature = model.steps, model.signature
    specs = signature.inputs
    if steps is not None and not {spec.name for spec in specs} <= values.keys():
        specs = steps.inputs
    optional = () if steps is None else steps.optional
    _name(model, values, specs, optional)
    found = {spec.name: _array(spec, values[spec.name]) for spec in specs if spec.name in values}
    batched = {} if specs is not signature.inputs else signature.batch_axes(specs)
    alone = [
        _add_batch(found, spec)
        for spec in specs
        if spec.name in found and (specs is not signature.inputs or batched.get(spec.name) == 0)
    ]
    return Inputs(found, any(alone))


def _name(model: Model, values: Row, specs: Sequence[TensorSpec], optional: Sequence[str]) -> None:
    """Give the value without the name of an input to the input without a value."""
    missing = [spec.name for spec in specs if spec.name not in values and spec.name not in optional]
    unnamed = [name for name in (DATA, BODY) if name in values and name not in {spec.name for spec in specs}]
    if len(missing) == 1 and unnamed:
        values[missing.pop()] = values.pop(unnamed.pop(0))
    unknown = values.keys() - {spec.name for spec in specs}
    if missing or unknown:
        named = ", ".join(f"'{spec.name}'" for spec in specs)
        problem = f"'{missing[0]}' is missing" if missing else f"'{shortened(min(unknown))}' is not one of them"
        raise InvalidArgument(
            f"the values of a request to model '{model.name}' are {named}, and {problem}; send each as a part of a "
            "form or a key of a JSON object"
        )


def joined(requests: Sequence[Inputs]) -> dict[str, Array]:
    """Return the inputs of several samples, or lists of them, as those of one request.

    Raises:
        InvalidArgument: they have different inputs or sizes.
    """
    first = requests[0].arrays
    try:
        return {name: np.concatenate([each.arrays[name] for each in requests]) for name in first}
    except (KeyError, ValueError) as error:
        raise InvalidArgument("the instances have different inputs or shapes; send each in its own request") from error


def _array(spec: TensorSpec, value: Any) -> Array:
    if spec.dtype is DType.BYTES:
        return _texts(spec, value)
    if isinstance(value, bytes):
        value = _numbers(spec, value)
    elif isinstance(value, str):
        value = parsed(value.encode("utf-8", "surrogatepass"))
    return value if isinstance(value, np.ndarray) else json_data.from_json(spec.name, spec.dtype, value)


def _texts(spec: TensorSpec, value: Any) -> Array:
    several = isinstance(value, list)
    items = [each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each for each in _listed(value)]
    if not all(isinstance(each, bytes) for each in items):
        raise InvalidArgument(f"the value '{spec.name}' must be a file or a text, or a JSON list of texts")
    found = as_bytes(items)
    return found if several else found.reshape(())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers(spec: TensorSpec, content: bytes) -> Any:
    """Return a tensor from JSON, or from the bytes of its elements, little-endian, of one sample or several."""
    start = content.lstrip()[:1]
    if start and start in _JSON_STARTS:
        try:
            return parsed(content)
        except InvalidArgument:
            pass  # numbers may begin with the same byte
    sizes = spec.shape[1:]
    size = math.prod(each for each in sizes if isinstance(each, int)) * spec.dtype.numpy.itemsize
    if not all(isinstance(each, int) for each in sizes) or not size or not content or len(content) % size:
        raise InvalidArgument(f"the value '{spec.name}' is neither JSON nor the bytes of {spec}; send JSON")
    found = np.frombuffer(content, spec.dtype.numpy.newbyteorder("<")).astype(spec.dtype.numpy, copy=False)
    shaped: Array = found.reshape(-1, *sizes)
    return shaped if len(content) > size else shaped[0]


def _add_batch(found: dict[str, Array], spec: TensorSpec) -> bool:
    """Add the batch to one sample; return whether it was one."""
    array = found[spec.name]
    if array.ndim != len(spec.shape) - 1:
        return False
    found[spec.name] = array[None]
    return True


def answer(response: InferResponse, model: Model, steps: Steps | None, *, alone: bool) -> Any:
    """Return the answer in the form of the handler of the model's task; without one, its outputs.

    Args:
        response: of the model.
        model: which answered.
        steps: that the request went through; None for one of tensors.
        alone: whether the request was one sample, whose answer is not in a list.
    """
    form = None if steps is None else _FORMS.get(steps.answer_form)
    if steps is not None and form is not None:
        rows = form(response.arrays, steps)
        return rows[0] if alone else rows
    outputs = {name: _plain(array) for name, _, array in response.outputs}
    specs, batch = response.route.outputs, model.signature.batch
    if steps is None and not all(spec.axis(batch) == 0 for spec in specs):
        return _single(outputs)
    rows = [_single(dict(zip(outputs, each, strict=True))) for each in zip(*outputs.values(), strict=True)]
    return rows[0] if alone else rows


def _single(outputs: Mapping[str, Any]) -> Any:
    """Return the value of the only output, or all values by name."""
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _plain(array: Array) -> Any:
    """Return an array as lists, with texts for BYTES."""
    values = np.asarray(array)
    return np.vectorize(text, [object])(values).tolist() if values.dtype == object and values.size else values.tolist()


def text(value: Any) -> str:
    """Return BYTES as text: in base64, if they are not UTF-8, such as a PNG."""
    content = value if isinstance(value, bytes) else str(value).encode()
    try:
        return content.decode()
    except UnicodeDecodeError:
        return base64.b64encode(content).decode()


def _classes(values: Mapping[str, Array], steps: Steps) -> list[Any]:
    chosen = any(isinstance(step, Classify) and step.top_k for step in steps.after)
    count = None if chosen or steps.task.startswith("text") else _BEST
    rows = zip(values["label"].tolist(), values["score"].tolist(), strict=True)
    return [dict(zip(map(text, labels[:count]), scores[:count], strict=True)) for labels, scores in rows]


def _boxes(values: Mapping[str, Array], steps: Steps) -> list[Any]:
    return [
        [{text(label): box, "score": score} for label, score, box in zip(*(each[:kept] for each in row), strict=True)]
        for *row, kept in _rows(values, "label", "score", "box", "count")
    ]


def _masks(values: Mapping[str, Array], steps: Steps) -> list[Any]:
    """Return masks by their labels; with scores, as labels may occur several times, an object for each."""
    if "score" not in values:
        return [
            {text(label): text(mask) for label, mask in zip(labels[:kept], masks[:kept], strict=True)}
            for labels, masks, kept in _rows(values, "label", "mask", "count")
        ]
    return [
        [{text(label): text(mask), "score": score} for label, score, mask in zip(*(e[:kept] for e in row), strict=True)]
        for *row, kept in _rows(values, "label", "score", "mask", "count")
    ]


def _rows(values: Mapping[str, Array], *names: str) -> Any:
    return zip(*(values[name].tolist() for name in names), strict=True)


_FORMS: Mapping[str, Callable[[Mapping[str, Array], Steps], list[Any]]] = {
    "masks": _masks,
    "boxes": _boxes,
    "classes": _classes,
}
"""The answers of TorchServe's handlers, for those of :data:`ingot.tasks.FORMS` that these have."""
