"""Asking a model with steps about texts, on behalf of the APIs of other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ingot.errors import IngotError, InvalidField, NotFound, quoted
from ingot.protocol.requests import InferRequest, Template
from ingot.runtime import Model
from ingot.server.net import compression
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.fields import Place, in_fields, listed, single
from ingot.server.plane.handlers import Call
from ingot.serving import ServedModel
from ingot.steps import Steps
from ingot.steps.after.classify import Classify
from ingot.steps.tokenize import Tokenize
from ingot.tensors import Array

EMBEDDING = "sentence-similarity"
RANKING = "text-ranking"
CLASSIFICATION = "text-classification"
VECTORS = "feature-extraction"
AT_ONCE = 1 << 10
"""Parts of an answer, such as names and scores, that the event loop puts together itself."""


class Served(NamedTuple):
    """A model that answers texts."""

    model: ServedModel
    steps: Steps

    @property
    def tokenize(self) -> Tokenize:
        """The step that reads the texts."""
        return next(step for step in self.steps.before if isinstance(step, Tokenize))

    @property
    def classify(self) -> Classify | None:
        """The step that makes scores of logits; None for an embedding."""
        return next((step for step in self.steps.after if isinstance(step, Classify)), None)

    @property
    def output(self) -> str:
        """The name of the answer: the scores, or the vectors."""
        return self.steps.outputs[0].name if self.classify is None else self.classify.score


class Answer(NamedTuple):
    """The answers of a model, by output."""

    values: Mapping[str, Array]

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return int(self.values["tokens"].sum()) if "tokens" in self.values else 0


def find(plane: DataPlane, name: str, *tasks: str) -> Served:
    """Return a model by its name, or ``name:version``.

    Args:
        plane: the server's data plane.
        name: as clients send it.
        tasks: what it may do.

    Raises:
        NotFound: no such model or version is served.
        Unavailable: it is still loading.
        InvalidField: it does something else.
    """
    served = with_steps(plane, name)
    steps = served.steps
    if steps.task not in tasks:
        raise InvalidField("model", f"is '{name}', whose task is {steps.task}; this API serves: {', '.join(tasks)}")
    if not any(isinstance(step, Tokenize) for step in steps.before):
        raise InvalidField("model", f"is '{name}', whose steps have no tokenizer")
    return served


def with_steps(plane: DataPlane, name: str) -> Served:
    """Return a model of any task by its name, or ``name:version``; errors as for :func:`find`."""
    base, _, version = name.partition(":")
    model = plane.repository.get(base, version)
    steps = model.steps
    if steps is None:
        _ = model.signature  # of a model that still loads, nothing is known
        if isinstance(model, Model) and model.generation is not None:
            raise InvalidField("model", f"is '{name}', which writes text; ask /v1/completions")
        raise InvalidField("model", f"is '{name}', which declares no steps for texts; ask POST /models/{name}")
    return Served(model, steps)


def chosen(call: Call, *tasks: str, named: str = "") -> Served:
    """Return the model that a call names in its path or body; without a name, the only one of these tasks.

    Raises:
        NotFound: no such model is served, or several do and none is named.
        InvalidField: as for :func:`find`.
    """
    if call.model and named not in ("", call.model):
        raise InvalidField("model", f"is '{named}', but the path names '{call.model}'; leave one of them out")
    if name := call.model or named:
        return find(call.plane, f"{name}:{call.version}" if call.version else name, *tasks)
    models = {model.name for model in call.plane.repository if model.steps is not None and model.steps.task in tasks}
    if len(models) == 1:
        return find(call.plane, models.pop(), *tasks)
    if models:
        listed = ", ".join(f"/models/{name}" for name in sorted(models))
        raise NotFound(f"this server has several models for this path; put one of these before it: {listed}")
    raise NotFound(f"no model of this server is loaded that does {' or '.join(tasks)}")


async def ask(
    call: Call,
    served: Served,
    texts: Sequence[str],
    second: Sequence[str] | None = None,
    *,
    prompt: str = "",
    truncate: bool | None = None,
    places: Sequence[Place] = (),
    choices: Mapping[str, tuple[Array, str]] = MappingProxyType({}),
) -> Answer:
    """Return the answer of a model to texts, or pairs of texts.

    Args:
        call: whose texts they are.
        served: the model.
        texts: one or more.
        second: the second text of each pair; None without pairs.
        prompt: the name of the prompt; empty for the model's default.
        truncate: False to refuse texts that were cut; otherwise the archive decides.
        places: where the body has the texts, and the second texts; by default in the list ``inputs``.
        choices: further raw inputs, each with the field of the body that has it.

    Raises:
        InvalidField: a text or the prompt is wrong; it names the field.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    tokenize = served.tokenize
    model = served.model
    named = dict(zip((tokenize.text, tokenize.pair), places or (listed("inputs"),), strict=False))
    others = {tokenize.prompt: "prompt_name"} | {name: field for name, (_, field) in choices.items()}
    try:
        # A query that is paired with each text may be long: it is refused before it is copied for all of them.
        for name, each in ((tokenize.text, texts), (tokenize.pair, second or ())):
            tokenize.check_lengths(name, each)
        arrays = raw_inputs(served, texts, second, prompt=prompt)
        arrays |= {name: array for name, (array, _) in choices.items()}
        request = InferRequest(Template(model.name, model.version), arrays, "", None, call.client)
        values = (await call.plane.infer(request, "http")).arrays
    except IngotError as error:
        raise in_fields(error, named | {name: single(field) for name, field in others.items()}) from error
    if truncate is False:
        refuse_cut(values, named[tokenize.text])
    return Answer(values)


def refuse_cut(values: Mapping[str, Array], place: Place) -> None:
    """Refuse texts that were cut.

    Raises:
        InvalidField: there is one; it names the place of the first of those that lost most.
    """
    if (cut := values.get("cut_tokens")) is not None and cut.any():
        index = int(cut.argmax())
        text = f"is false, and '{place(index)}' has {int(cut[index])} tokens too many; send a shorter text"
        raise InvalidField("truncate", text)


def raw_inputs(
    served: Served, texts: Sequence[str], second: Sequence[str] | None = None, *, prompt: str = ""
) -> dict[str, Array]:
    """Return texts as the raw inputs of a model.

    Raises:
        InvalidField: the model has no pairs, or no prompts.
    """
    tokenize = served.tokenize
    inputs = {tokenize.text: texts}
    if second is not None:
        if not tokenize.pair:
            raise InvalidField("inputs", f"has pairs of texts; model '{served.model.name}' reads single texts")
        inputs[tokenize.pair] = second
    if prompt:
        if not tokenize.prompts:
            raise InvalidField("prompt_name", f"is {quoted(prompt)}; model '{served.model.name}' has no prompts")
        inputs[tokenize.prompt] = [prompt]
    return {
        name: np.array([text.encode("utf-8", "surrogatepass") for text in texts], object)
        for name, texts in inputs.items()
    }


def function_of(served: Served, name: str, field: str) -> dict[str, tuple[Array, str]]:
    """Return the choice of the function that makes scores of logits.

    Raises:
        InvalidField: the model's steps apply another one.
    """
    step = served.classify
    if step is not None and name == step.function:
        return {}
    if step is None or not step.choice:
        declared = "none" if step is None else step.function
        raise InvalidField(field, f"asks for {name}; the model's steps apply {declared} only, so leave it out")
    return {step.choice: (np.array([name.encode()], object), field)}


async def embed(
    call: Call,
    served: Served,
    texts: Sequence[str],
    *,
    prompt: str = "",
    normalize: bool | None = None,
    truncate: bool | None = None,
    size: int = 0,
    place: Place = listed("inputs"),  # noqa: B008 - immutable
) -> tuple[Array, Answer]:
    """Return vectors of texts, float32[n, size], and the whole answer.

    Args:
        call: whose texts they are.
        served: the model.
        texts: one or more.
        prompt: the name of the prompt that is put before each; empty for the model's default.
        normalize: True for vectors of length 1; None for vectors as the model's steps make them.
        truncate: as for :func:`ask`.
        size: the leading elements that are kept, and have the length 1 again; 0 for all.
        place: where the body has the texts.

    Raises:
        InvalidField: the model cannot do that.
        IngotError: as for :func:`ask`.
    """
    whole = int(served.steps.outputs[0].shape[-1])
    if size > whole:
        raise InvalidField("dimensions", f"is {size}; vectors of model '{served.model.name}' have {whole}")
    normal = any(step.kind == "normalize" for step in served.steps.after)
    if normalize is False and normal:
        raise InvalidField("normalize", f"is false; vectors of model '{served.model.name}' always have the length 1")
    answer = await ask(call, served, texts, prompt=prompt, truncate=truncate, places=(place,))
    vectors: Array = answer.values[served.output]
    if size and size < whole:
        vectors, normalize = vectors[:, :size], True
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return vectors, answer


async def scores(
    call: Call, served: Served, query: str, texts: Sequence[str], *, truncate: bool | None = None, field: str
) -> tuple[list[float], Answer]:
    """Return how well each text answers a query, and the whole answer; the body has the texts in ``field``.

    Raises:
        IngotError: as for :func:`ask`.
    """
    places = single("query"), listed(field)
    answer = await ask(call, served, [query] * len(texts), texts, truncate=truncate, places=places)
    found: Array = answer.values[served.output]
    if found.ndim > 1:
        raise InvalidField("model", f"'{served.model.name}' has {found.shape[1]} scores for a pair; ranking needs one")
    return [float(score) for score in found], answer


async def labelled(served: Served, answer: Answer, count: int = 0) -> list[list[dict[str, object]]]:
    """Return the classes of each text, best first, as ``{"label", "score"}``.

    Args:
        served: the model.
        answer: its answer.
        count: the best of them that are kept; 0 for all.

    Raises:
        InvalidField: the model has no names of classes.
    """
    step = served.classify
    if step is None or not {step.label, step.score} <= answer.values.keys():
        raise InvalidField("model", f"is '{served.model.name}', which has no names of classes")
    names, scores = (answer.values[name][:, : count or None] for name in (step.label, step.score))
    return await compression.run(partial(_labelled, names, scores), in_thread=scores.size > AT_ONCE)


def _labelled(names: Array, scores: Array) -> list[list[dict[str, object]]]:
    return [
        [
            {"label": name.decode() if isinstance(name, bytes) else str(name), "score": score}
            for name, score in zip(row, found, strict=True)
        ]
        for row, found in zip(names.tolist(), scores.tolist(), strict=True)
    ]
