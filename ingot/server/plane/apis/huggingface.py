"""``POST /models/NAME`` with ``inputs`` and ``parameters``, as ``huggingface_hub.InferenceClient(model=URL)`` sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingot.errors import IngotError, InvalidField, public_text
from ingot.protocol.json_codec import STATUS
from ingot.runtime.model import Model
from ingot.server.plane.apis import asking, files, on_tokens, samples, tei, text_generation
from ingot.server.plane.apis.asking import Served
from ingot.server.plane.fields import Fields, at_root, place_of, texts_of
from ingot.server.plane.handlers import Call
from ingot.steps.after.classify import FUNCTIONS
from ingot.tasks import ON_TEXTS


async def answer(call: Call) -> Any:
    """Return the answer of a model, in the form of its task.

    Raises:
        InvalidField: a field is wrong.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    name, _, version = call.model.partition(":")
    model = call.plane.repository.get(name, version)
    if isinstance(model, Model) and model.generation is not None and model.texts is not None:
        return await text_generation.answer(call, model)
    if model.steps is None:
        return await samples.answer(call, model)
    if files.takes_files(asked := asking.with_steps(call.plane, call.model)):
        return await files.answer(call, asked)
    if isinstance(call.content.get("inputs"), bytes):
        raise InvalidField("inputs", f"are a file; model '{call.model}' reads texts: send JSON")
    served = asking.chosen(call, *ON_TEXTS)
    if (form := on_tokens.TASKS.get(served.steps.task)) is not None:
        return await form(call, served)
    if served.steps.task == asking.EMBEDDING:
        return await _vectors(call)
    if served.steps.task == asking.RANKING:
        raise InvalidField("inputs", f"do not fit a ranking; ask POST /models/{served.model.name}/rerank")
    parameters = call.content.get("parameters")
    if isinstance(parameters, Mapping) and "candidate_labels" in parameters:
        return await on_tokens.candidates(call, served)
    return await _classes(call, served)


async def _vectors(call: Call) -> Any:
    """Return the vectors of texts, or the similarities of a ``source_sentence`` and ``sentences``."""
    if isinstance(call.content.get("inputs"), Mapping):
        return await tei.similarity(call)
    return await tei.embed(replace(call, content=at_root(call.content, on_tokens.AT_ROOT)))


async def _classes(call: Call, served: Served) -> list[list[dict[str, Any]]]:
    """Return the classes of each text, best first."""
    fields = Fields(call.content)
    parameters = fields.nested("parameters")
    texts = texts_of("inputs", fields.any("inputs"), served.steps.max_items)
    count = parameters.count("top_k")
    declared = "none" if served.classify is None else served.classify.function
    wanted = parameters.text("function_to_apply", declared, [*FUNCTIONS])
    choices = asking.function_of(served, wanted, "parameters.function_to_apply")
    parameters.end()
    fields.end()
    places = [place_of(call.content, "inputs")]
    return await asking.labelled(served, await asking.ask(call, served, texts, places=places, choices=choices), count)


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    return STATUS[error.code], {"error": public_text(error)}
