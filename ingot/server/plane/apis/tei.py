"""text-embeddings-inference's ``/embed``, ``/predict``, ``/similarity`` and ``/info``."""

from __future__ import annotations

from typing import Any

from ingot._version import __version__
from ingot.errors import Code, IngotError, InvalidField, public_text
from ingot.protocol.json_codec import STATUS
from ingot.server.plane.apis import asking
from ingot.server.plane.apis.asking import Served
from ingot.server.plane.fields import Fields, Place, check_count, place_of, single, texts_of
from ingot.server.plane.handlers import Call
from ingot.tensors import Array

_KINDS = {
    Code.INVALID_ARGUMENT: (422, "Validation"),
    Code.TOO_LARGE: (413, "Validation"),
    Code.TOO_MANY_REQUESTS: (429, "Overloaded"),
    Code.UNAVAILABLE: (503, "Unhealthy"),
}


async def embed(call: Call) -> Array:
    """Return a vector for each text."""
    fields = Fields(call.content)
    served = asking.chosen(call, asking.EMBEDDING)
    texts = fields.texts("inputs", served.steps.max_items)
    normalize, prompt, size = fields.flag("normalize"), fields.text("prompt_name", ""), fields.count("dimensions")
    truncate = truncation(fields, served)
    fields.end()
    place = place_of(call.content, "inputs")
    vectors, _ = await asking.embed(
        call, served, texts, prompt=prompt, normalize=normalize, truncate=truncate, size=size, place=place
    )
    return vectors


async def similarity(call: Call) -> list[float]:
    """Return the cosine of the angle between one text and each of the others."""
    fields = Fields(call.content)
    inputs, parameters = fields.nested("inputs"), fields.nested("parameters")
    served = asking.chosen(call, asking.EMBEDDING)
    source, sentences = inputs.text("source_sentence"), inputs.texts("sentences", served.steps.max_items - 1)
    prompt = parameters.text("prompt_name", "")
    truncate = truncation(parameters, served)
    for each in (inputs, parameters, fields):
        each.end()
    vectors, _ = await asking.embed(
        call, served, [source, *sentences], prompt=prompt, normalize=True, truncate=truncate, place=_compared
    )
    return [float(value) for value in vectors[1:] @ vectors[0]]


async def predict(call: Call) -> list[Any]:
    """Return the classes of a text or a pair of texts, best first; a list of such lists for several."""
    fields = Fields(call.content)
    given = fields.any("inputs")
    served = asking.chosen(call, asking.CLASSIFICATION)
    choices = asking.function_of(served, "none", "raw_scores") if fields.flag("raw_scores") else {}
    truncate = truncation(fields, served)
    fields.end()
    alone, rows = _rows(given, served.steps.max_items)
    second = [row[1] for row in rows] if len(rows[0]) == 2 else None
    places = [_in_column(given, column, alone=alone) for column in range(2)]
    firsts = [row[0] for row in rows]
    answer = await asking.ask(call, served, firsts, second, truncate=truncate, places=places, choices=choices)
    answers = await asking.labelled(served, answer)
    return answers[0] if alone else list(answers)


async def info(call: Call) -> dict[str, Any]:
    """Describe the model."""
    served = asking.chosen(call, asking.EMBEDDING, asking.CLASSIFICATION, asking.RANKING, asking.VECTORS)
    steps = served.steps
    tokenize = served.tokenize
    return {
        "model_id": served.model.name,
        "model_sha": served.model.digest or None,
        "model_dtype": str(served.model.signature.outputs[0].dtype.numpy),
        "model_type": _type(served),
        "max_input_length": tokenize.max_length,
        "max_client_batch_size": steps.max_items,
        "auto_truncate": tokenize.overflow == "cut",
        "version": __version__,
    }


def truncation(fields: Fields, served: Served) -> bool | None:
    """Return whether texts that are too long are cut: False refuses them, None leaves it to the archive.

    Raises:
        InvalidField: the model's steps cut the other end.
    """
    truncate = fields.flag("truncate")
    side = served.tokenize.truncation_side
    wanted = fields.text("truncation_direction", side.title(), ("Left", "Right", "left", "right")).lower()
    if wanted != side and truncate is not False:
        raise InvalidField("truncation_direction", f"is '{wanted}'; the model cuts texts on the {side}")
    return truncate


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    status, kind = _KINDS.get(error.code, (STATUS[error.code], "Backend"))
    return status, {"error": public_text(error), "error_type": kind}


def _type(served: Served) -> dict[str, Any]:
    steps = served.steps
    if steps.task == asking.EMBEDDING:
        pooling = next((step.modes[0] for step in steps.after if step.kind == "pool"), "mean")
        return {"embedding": {"pooling": pooling}}
    if steps.task == asking.VECTORS:
        return {"embedding": {"pooling": "none"}}
    if steps.task == asking.RANKING:
        return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    labels = () if served.classify is None else served.classify.labels
    return {
        "classifier": {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
    }


def _compared(index: int | None) -> str:
    """Return the place of a text that is compared: the source comes first."""
    if index is None:
        return "inputs"
    return f"inputs.sentences[{index - 1}]" if index else "inputs.source_sentence"


def _in_column(given: Any, column: int, *, alone: bool) -> Place:
    """Return the places of the first or second texts of rows, or of one row."""
    if isinstance(given, str):
        return single("inputs")
    if alone:
        return lambda index: f"inputs[{column}]"
    return lambda index: "inputs" if index is None else f"inputs[{index}][{column}]"


def _rows(given: Any, most: int) -> tuple[bool, list[list[str]]]:
    """Return whether there is one item, and the text or pair of each."""
    check_count("inputs", given, most)
    if isinstance(given, str):
        return True, [[given]]
    texts = isinstance(given, list) and given and all(isinstance(item, str) for item in given)
    if texts and len(given) <= 2:
        return True, [list(given)]
    if texts or not isinstance(given, list) or not given:
        raise InvalidField("inputs", "must be a text, a pair of texts, or a list of lists of one or two texts")
    rows = [texts_of("inputs", item, 2) for item in given]
    if any(len(row) != len(rows[0]) for row in rows):
        raise InvalidField("inputs", "mixes texts and pairs; send lists of one text each, or of two")
    return False, rows
