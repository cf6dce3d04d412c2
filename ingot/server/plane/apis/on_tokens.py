"""The forms of ``POST /models/NAME`` for tasks on tokens, and for labels that a request brings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.errors import InvalidField, quoted
from ingot.server.net import compression
from ingot.server.plane.apis import asking, tokens
from ingot.server.plane.apis.asking import Served
from ingot.server.plane.fields import Fields, Place, at_root, check_count, listed, place_of, single, texts_of
from ingot.server.plane.handlers import Call
from ingot.steps.after import fill, span
from ingot.steps.after.classify import softmax
from ingot.steps.after.entities import AGGREGATIONS, Entities
from ingot.steps.after.fill import Fill
from ingot.steps.after.span import Span
from ingot.tensors import Array

AT_ROOT = ("normalize", "prompt_name", "truncate", "truncation_direction")
"""Parameters of models of vectors, which clients send at the root."""
# Pairs of a text and a candidate label.
_MOST_LABELS = 256


async def entities(call: Call, served: Served) -> Any:
    """Return the entities of a text, or of each text of a list."""
    fields, parameters = _opened(call)
    step = _step(served, Entities)
    texts = texts_of("inputs", fields.any("inputs"), served.steps.max_items)
    wanted = parameters.text("aggregation_strategy", step.aggregation, AGGREGATIONS)
    ignored = parameters.any("ignore_labels")
    if ignored is not None:
        ignored = texts_of("parameters.ignore_labels", ignored, len(step.labels)) if ignored else []
        if missing := set(step.ignored) - set(ignored):
            named = ", ".join(sorted(missing))
            raise InvalidField("parameters.ignore_labels", f"lacks {named}, which the model's steps leave out")
    if parameters.any("stride") is not None:
        raise InvalidField("parameters.stride", "is not for this server: divide texts that are too long")
    _end(fields, parameters)
    choices = {step.choice: (_text(wanted), "parameters.aggregation_strategy")}
    values = (await asking.ask(call, served, texts, places=[place_of(call.content, "inputs")], choices=choices)).values
    rows = await _rows(values, ("entity", "score", "word", "start", "end", "index"))
    label = "entity" if wanted == "none" else "entity_group"
    found = [[_entity(item, label) for item in row if item["entity"] not in (ignored or ())] for row in rows]
    return found[0] if isinstance(call.content["inputs"], str) else found


def _entity(item: dict[str, Any], label: str) -> dict[str, Any]:
    index = item.pop("index")
    return {label: item.pop("entity"), **item, **({"index": index} if label == "entity" else {})}


async def answers(call: Call, served: Served) -> Any:
    """Return the answer to a question, or the best ones if ``top_k`` asks for several; a list of these for a list."""
    fields, parameters = _opened(call)
    step, given = _step(served, Span), fields.any("inputs")
    alone = isinstance(given, Mapping)
    check_count("inputs", given, served.steps.max_items)
    if not given or not (alone or isinstance(given, list)):
        raise InvalidField("inputs", "must be an object with question and context, or a list of these")
    questions, contexts = [], []
    for index, item in enumerate([given] if alone else given):
        where = "inputs" if alone else f"inputs[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidField(where, f"is {quoted(item)}; it must be an object with question and context")
        pair = Fields(item, where)
        questions.append(pair.text("question"))
        contexts.append(pair.text("context"))
        pair.end()
    count = parameters.count("top_k", step.top_k, span.MOST)
    tokenize = served.tokenize
    _same(
        parameters,
        max_answer_len=step.max_answer_len,
        align_to_words=step.words,
        handle_impossible_answer=False,
        doc_stride=tokenize.stride,
        max_seq_len=tokenize.max_length,
    )
    _end(fields, parameters)
    choices = {step.choice: (np.array([count], np.int32), "parameters.top_k")}
    places = [_of_pair(name, alone=alone) for name in ("question", "context")]
    values = (await asking.ask(call, served, questions, contexts, places=places, choices=choices)).values
    rows = [row or [_NO_ANSWER] for row in await _rows(values, ("answer", "score", "start", "end"))]
    found = [row[0] if count == 1 else row for row in rows]
    return found[0] if alone else found


_NO_ANSWER = {"answer": "", "score": 0.0, "start": 0, "end": 0}


def _of_pair(name: str, *, alone: bool) -> Place:
    return lambda index: f"inputs.{name}" if alone else ("inputs" if index is None else f"inputs[{index}].{name}")


async def words(call: Call, served: Served) -> Any:
    """Return the words that fit best for the mask of a text; a list of these for several masks, or texts."""
    fields, parameters = _opened(call)
    step = _step(served, Fill)
    texts = texts_of("inputs", fields.any("inputs"), served.steps.max_items)
    count = parameters.count("top_k", most=fill.MOST)
    if parameters.any("targets") is not None:
        raise InvalidField("parameters.targets", "is not for this server: search the answers of a larger top_k")
    _end(fields, parameters)
    choices = {step.choice: (np.array([count], np.int32), "parameters.top_k")} if count else {}
    values = (await asking.ask(call, served, texts, places=[place_of(call.content, "inputs")], choices=choices)).values
    masks = await _rows(values, ("score", "token", "token_str", "sequence"))
    found = [row[0] if len(row) == 1 else row for row in masks]
    return found[0] if isinstance(call.content["inputs"], str) else found


async def vectors(call: Call, served: Served) -> Any:
    """Return the vectors of each text's tokens; parameters may be at the root."""
    content = at_root(call.content, AT_ROOT)
    if content.pop("normalize", None):
        raise InvalidField("normalize", "is true; vectors of tokens are as the model makes them")
    return await tokens.embed_all(replace(call, content=content))


async def candidates(call: Call, served: Served) -> Any:
    """Return how well candidate labels fit a text, by a model that says whether a text entails another."""
    fields, parameters = _opened(call)
    text, step = fields.text("inputs"), served.classify
    labels = texts_of("parameters.candidate_labels", parameters.any("candidate_labels"), _MOST_LABELS)
    template = parameters.text("hypothesis_template", "This example is {}.")
    several = parameters.flag("multi_label") or len(labels) == 1
    _end(fields, parameters)
    if "{}" not in template:
        raise InvalidField("parameters.hypothesis_template", "has no {}, the place of the label")
    names = [] if step is None else [name.lower() for name in step.labels]
    entails = next((index for index, name in enumerate(names) if name.startswith("entail")), None)
    if step is None or entails is None or len(names) < 2:
        raise InvalidField("parameters.candidate_labels", "needs a model with the label entailment, which this has not")
    longest, count = served.tokenize.max_characters, template.count("{}")
    for index, label in enumerate(labels):
        if (size := len(template) + count * (len(label) - 2)) > longest:
            name = f"parameters.candidate_labels[{index}]"
            raise InvalidField(name, f"makes a text of {size} characters, over the limit of {longest}; shorten it")
    pairs = [template.replace("{}", label) for label in labels]
    places = [single("inputs"), listed("parameters.candidate_labels")]
    choices = asking.function_of(served, "none", "parameters.candidate_labels")
    values = (await asking.ask(call, served, [text] * len(pairs), pairs, places=places, choices=choices)).values
    logits = _in_order(values, step.label, step.score, step.labels)
    against = len(names) - 1 if entails == 0 else 0
    compared = logits[:, [against, entails]] if several else logits[:, entails][None]
    scores = softmax(compared)
    found = scores[:, 1] if several else scores[0]
    order = np.argsort(-found, kind="stable").tolist()
    return [{"label": labels[index], "score": float(found[index])} for index in order]


def _in_order(values: Mapping[str, Array], label: str, score: str, labels: Sequence[str]) -> Array:
    """Return the scores of classes in the order of the model's labels."""
    if values[label].shape[1] < len(labels):
        raise InvalidField("model", "returns its best classes only, and candidate labels need all")
    places = {name.encode(): index for index, name in enumerate(labels)}
    found = np.empty(values[score].shape, np.float32)
    for row, (names, scores) in enumerate(zip(values[label].tolist(), values[score], strict=True)):
        found[row, [places[name] for name in names]] = scores
    return found


def _opened(call: Call) -> tuple[Fields, Fields]:
    fields = Fields(call.content)
    return fields, fields.nested("parameters")


def _end(*fields: Fields) -> None:
    for each in reversed(fields):
        each.end()


def _same(parameters: Fields, **declared: object) -> None:
    """Refuse parameters that differ from what the archive declares."""
    for name, known in declared.items():
        if (value := parameters.any(name)) is not None and value != known:
            raise InvalidField(f"parameters.{name}", f"is {quoted(value)}; the model's steps declare {known}")


def _step(served: Served, kind: type[Any]) -> Any:
    found = next((step for step in served.steps.after if isinstance(step, kind)), None)
    if found is None:
        task, name = served.steps.task, kind.__name__.lower()
        raise InvalidField("model", f"is '{served.model.name}', whose task is {task}, but whose steps have no '{name}'")
    return found


def _text(value: str) -> Array:
    return np.array([value.encode()], object)


async def _rows(values: Mapping[str, Array], names: Sequence[str]) -> list[list[Any]]:
    """Return the answers of each item as objects, without padding; lists of these for those of each mask."""
    counts, columns = values["count"].tolist(), {name: values[name] for name in names}

    def rows() -> list[list[Any]]:
        return [_items({name: each[row, :count] for name, each in columns.items()}) for row, count in enumerate(counts)]

    return await compression.run(rows, in_thread=columns[names[0]].size > asking.AT_ONCE)


def _items(columns: Mapping[str, Array]) -> list[Any]:
    """Return an object for each element of arrays of one dimension; of more, lists of these."""
    first = next(iter(columns.values()))
    if first.ndim > 1:
        return [_items({name: array[index] for name, array in columns.items()}) for index in range(len(first))]
    plain = (
        [item.decode(errors="replace") if isinstance(item, bytes) else item for item in array.tolist()]
        for array in columns.values()
    )
    return [dict(zip(columns, row, strict=True)) for row in zip(*plain, strict=True)]


TASKS: Mapping[str, Callable[[Call, Served], Awaitable[Any]]] = {
    "token-classification": entities,
    "question-answering": answers,
    "fill-mask": words,
    "feature-extraction": vectors,
}
"""The tasks whose requests have fields that others do not have."""
