"""Answers to files of pictures and sounds in the form of Hugging Face's pipelines, on behalf of ``huggingface``."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import IngotError, InvalidField, quoted
from ingot.protocol.requests import InferRequest, Template
from ingot.server.net import compression
from ingot.server.plane.apis.asking import AT_ONCE, Served
from ingot.server.plane.fields import Fields, check_count, in_fields, listed, single
from ingot.server.plane.handlers import Call
from ingot.steps import ItemStep
from ingot.steps.after.classify import FUNCTIONS
from ingot.steps.after.segments import SUBTASKS, Segments
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

Rows = list[Any]
"""The answer to each file."""
# Classes that transformers' pipelines return unless asked for more or fewer.
_CLASSES = 5
# Answers that are files.
_DRAWN = {"mask", "depth"}


class _Form(NamedTuple):
    """How an answer is read from a model's outputs; ``parameters`` makes further inputs of those in a request."""

    rows: Callable[[Mapping[str, Array], int], Rows]
    parameters: Callable[[Fields, Served], dict[str, Array]] = lambda parameters, served: {}
    counted: bool = False


def takes_files(served: Served) -> bool:
    """Return whether all that a model needs is a file."""
    steps = served.steps
    needed = {spec.name for spec in steps.inputs} - set(steps.optional)
    return any(isinstance(step, ItemStep) and needed == set(step.reads) for step in steps.before)


async def answer(call: Call, served: Served) -> Any:
    """Return the answer of a model to a file, or to each of several.

    Args:
        call: ``inputs`` are the bytes of a file, or texts in base64, as JSON has no bytes.
        served: a model that needs a file only.

    Raises:
        InvalidField: a field is wrong, or the model's outputs have no form in this API.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    fields, form = Fields(call.content), _form(served)
    parameters = fields.nested("parameters")
    given = fields.any("inputs")
    files = _files(given, served.steps.max_items)
    count = parameters.count("top_k", _CLASSES) if form.counted else 0
    further = form.parameters(parameters, served)
    parameters.end()
    fields.end()
    [step] = [step for step in served.steps.before if isinstance(step, ItemStep)]
    model = served.model
    inputs = {step.reads[0]: as_bytes(files), **further}
    request = InferRequest(Template(model.name, model.version), inputs, "", None, call.client)
    place = listed("inputs") if isinstance(given, list) else single("inputs")
    try:
        values = (await call.plane.infer(request, "http")).arrays
    except IngotError as error:
        raise in_fields(error, {step.reads[0]: place}) from error
    many = sum(array.size for array in values.values()) > AT_ONCE or not _DRAWN.isdisjoint(values)
    rows = await compression.run(partial(form.rows, values, count), in_thread=many)
    return rows if isinstance(given, list) else rows[0]


def _files(given: object, most: int) -> list[bytes]:
    check_count("inputs", given, most)
    values: list[Any] = given if isinstance(given, list) else [given]
    if not values or not all(isinstance(each, str | bytes) for each in values):
        raise InvalidField("inputs", "must be a file as bytes, with its content type, or as a text in base64")
    return [each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each for each in values]


def _form(served: Served) -> _Form:
    steps = served.steps
    if (form := FORMS.get(steps.answer_form)) is not None:
        return form
    if "last_hidden_state" in (spec.name for spec in steps.outputs):
        return _Form(lambda values, count: [*values["last_hidden_state"].tolist()])
    raise InvalidField("model", f"is '{served.model.name}', whose task {steps.task} this API does not have")


def _declared_function(parameters: Fields, served: Served) -> dict[str, Array]:
    """Refuse another function than that of the model's steps."""
    declared = "none" if served.classify is None else served.classify.function
    wanted = parameters.text("function_to_apply", declared, [*FUNCTIONS])
    if wanted != declared:
        raise InvalidField("parameters.function_to_apply", f"is '{wanted}'; the model's steps apply {declared}")
    return {}


def _threshold(parameters: Fields, served: Served, name: str = "threshold") -> dict[str, Array]:
    value = parameters.any(name)
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidField(f"parameters.{name}", f"is {quoted(value)}; it must be a number from 0 to 1")
    if name not in served.steps.optional:
        raise InvalidField(f"parameters.{name}", "is fixed in the model's steps; leave it out")
    return {name: np.full(1, value, np.float32)}


def _segmentation(parameters: Fields, served: Served) -> dict[str, Array]:
    """Return the choices of a segmentation by queries; one by classes has none."""
    step = next((each for each in served.steps.after if isinstance(each, Segments)), None)
    if step is None:
        parameters.text("subtask", "semantic", ("semantic",))
        return {}
    found = {"subtask": np.array([parameters.text("subtask", step.subtask, SUBTASKS).encode()], object)}
    for name in step.shared[1:]:
        found.update(_threshold(parameters, served, name))
    return found


def _classes(values: Mapping[str, Array], count: int) -> Rows:
    pairs = zip(values["label"].tolist(), values["score"].tolist(), strict=True)
    return [
        [{"label": _text(label), "score": score} for label, score in zip(labels[:count], scores, strict=False)]
        for labels, scores in pairs
    ]


def _boxes(values: Mapping[str, Array], count: int) -> Rows:
    further = [name for name in ("polygon",) if name in values]
    return [
        [
            {"label": _text(label), "score": score, "box": _box(box), **dict(zip(further, others, strict=True))}
            for label, score, box, *others in zip(*(each[:kept] for each in row), strict=True)
        ]
        for *row, kept in _rows(values, "label", "score", "box", *further, "count")
    ]


def _box(corners: Sequence[float]) -> dict[str, int]:
    """Return corners without fractions, as transformers' pipeline cuts them off."""
    return dict(zip(("xmin", "ymin", "xmax", "ymax"), map(int, corners), strict=True))


def _masks(values: Mapping[str, Array], count: int) -> Rows:
    return [
        [
            {"label": _text(label), "score": score or None, "mask": _base64(mask)}
            for label, score, mask in zip(*(each[:kept] for each in row), strict=True)
        ]
        for *row, kept in _rows({"score": np.zeros(values["label"].shape), **values}, "label", "score", "mask", "count")
    ]


def _lines(values: Mapping[str, Array], count: int) -> Rows:
    return [[{"generated_text": _text(text), "score": score}] for text, score in _rows(values, "text", "score")]


def _depths(values: Mapping[str, Array], count: int) -> Rows:
    """Return the drawn depths; as numbers they would take 20 bytes for each pixel."""
    return [{"depth": _base64(file)} for file in values["depth"].tolist()]


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def _transcripts(values: Mapping[str, Array], count: int) -> Rows:
    return [{"text": _text(text)} for text in values["text"].tolist()]


def _rows(values: Mapping[str, Array], *names: str) -> Any:
    return zip(*(values[name].tolist() for name in names), strict=True)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


FORMS: Mapping[str, _Form] = {
    "masks": _Form(_masks, _segmentation),
    "boxes": _Form(_boxes, _threshold),
    "depths": _Form(_depths),
    "classes": _Form(_classes, _declared_function, counted=True),
    "transcripts": _Form(_transcripts),
    "lines": _Form(_lines),
}
"""How the answers of each form of :data:`ingot.tasks.FORMS` are read."""
