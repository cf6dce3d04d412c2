"""text-embeddings-inference's ``/embed_all``, ``/tokenize`` and ``/decode``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ingot.errors import IngotError, InvalidField
from ingot.protocol.requests import InferRequest, Template
from ingot.server.net import compression
from ingot.server.plane.apis import asking, tei
from ingot.server.plane.apis.asking import Served
from ingot.server.plane.fields import Fields, check_count, in_fields, place_of, single
from ingot.server.plane.handlers import Call
from ingot.steps import OpenedSteps, StepTime, Values
from ingot.steps.after.pool import Pool
from ingot.steps.tokenize import MOST_TOKENS, Tokenizing
from ingot.tasks import ON_TEXTS
from ingot.tensors import Array

# Tokens of a request whose vectors are answered: JSON has some 4 KB for each.
_MOST_VECTORS = 1 << 14
# Elements of vectors that the event loop copies itself.
_AT_ONCE = 1 << 18

T = TypeVar("T")


async def embed_all(call: Call) -> list[Array]:
    """Return the vectors of each text's tokens, without pooling."""
    fields = Fields(call.content)
    served = asking.chosen(call, asking.EMBEDDING, asking.VECTORS)
    texts, prompt = fields.texts("inputs", served.steps.max_items), fields.text("prompt_name", "")
    truncate = tei.truncation(fields, served)
    fields.end()
    if served.steps.task == asking.VECTORS:
        answer = await asking.ask(
            call, served, texts, prompt=prompt, truncate=truncate, places=[place_of(call.content, "inputs")]
        )
        vectors, counts = answer.values[served.output], answer.values["tokens"]
        _check_tokens("inputs", int(counts.sum()), _MOST_VECTORS)
        return [row[:count] for row, count in zip(vectors, counts.tolist(), strict=True)]
    return await _unpooled(call, served, asking.raw_inputs(served, texts, prompt=prompt), truncate)


async def _unpooled(call: Call, served: Served, raw: Mapping[str, Array], truncate: bool | None) -> list[Array]:
    """Return the vectors that an embedding pools."""
    pool = next((step for step in served.steps.after if isinstance(step, Pool)), None)
    if pool is None:
        raise InvalidField("inputs", f"have no vectors of tokens in model '{served.model.name}'")

    def prepared(steps: OpenedSteps, times: list[StepTime]) -> tuple[tuple[Values, dict[str, Array]], Values]:
        steps.check(raw)
        values = steps.prepare(raw, times)
        _check_tokens("inputs", int(values["tokens"].sum()), _MOST_VECTORS)
        return (values, steps.tensors(values)), values

    values, tensors = await _aside(call, served, prepared, raw)
    if truncate is False:
        asking.refuse_cut(values, place_of(call.content, "inputs"))
    model = served.model
    request = InferRequest(Template(model.name, model.version), tensors, "", None, call.client)
    vectors = (await call.plane.infer(request, "http")).arrays[pool.tokens]
    return await compression.run(
        partial(_unpadded, vectors, values[pool.attention_mask]), in_thread=vectors.size > _AT_ONCE
    )


def _check_tokens(name: str, count: int, most: int) -> None:
    """Refuse a request whose answer would take seconds and hundreds of megabytes.

    Raises:
        InvalidField: it has more than ``most`` tokens.
    """
    if count > most:
        raise InvalidField(name, f"has {count} tokens in all, over the limit of {most}; divide the request")


def _unpadded(vectors: Array, masks: Array) -> list[Array]:
    return [row[mask == 1].astype(np.float32) for row, mask in zip(vectors, masks, strict=True)]


async def tokenize(call: Call) -> list[list[dict[str, Any]]]:
    """Return the tokens of each text; texts are not cut."""
    fields = Fields(call.content)
    served = asking.chosen(call, *ON_TEXTS)
    texts, special = fields.texts("inputs", served.steps.max_items), fields.flag("add_special_tokens")
    prompt = fields.text("prompt_name", "")
    fields.end()
    raw = asking.raw_inputs(served, texts, prompt=prompt)
    found: list[list[dict[str, Any]]] = await _tokenized(call, served, partial(_tokens, raw, special is not False), raw)
    return found


def _tokens(raw: Mapping[str, Array], special: bool, step: Tokenizing) -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "id": number,
                "text": token if added else text[start:stop],
                "special": bool(added),
                "start": None if added else start,
                "stop": None if added else stop,
            }
            for number, token, added, (start, stop) in zip(
                each.ids, each.tokens, each.special_tokens_mask, each.offsets, strict=True
            )
        ]
        for text, each in step.tokens(raw, special=special)
    ]


async def decode(call: Call) -> list[str]:
    """Return the text of each list of ids."""
    fields = Fields(call.content)
    served = asking.chosen(call, *ON_TEXTS)
    given, skip = fields.any("ids"), fields.flag("skip_special_tokens")
    fields.end()
    rows = _ids(given, served.steps.max_items)

    def decoded(step: Tokenizing) -> list[str]:
        return step.tokenizer.decode(rows, skip_special=skip is not False)

    found: list[str] = await _tokenized(call, served, decoded, {"ids": np.zeros(sum(map(len, rows)), np.int64)})
    return found


def _ids(given: Any, most: int) -> list[list[int]]:
    rows = given if isinstance(given, list) and given and all(isinstance(row, list) for row in given) else [given]
    check_count("ids", rows, most)
    if not all(isinstance(row, list) and all(type(number) is int for number in row) for row in rows):
        raise InvalidField("ids", "must be a list of whole numbers, or a list of such lists")
    if wrong := [number for row in rows for number in row if not 0 <= number < 1 << 32]:
        raise InvalidField("ids", f"has {wrong[0]}; ids are from 0 to {(1 << 32) - 1}")
    _check_tokens("ids", sum(map(len, rows)), MOST_TOKENS)
    return rows


async def _tokenized(call: Call, served: Served, work: Callable[[Tokenizing], T], read: Mapping[str, Array]) -> T:
    found: T = await _aside(call, served, lambda steps, times: (steps.tokenized(work, times), {}), read)
    return found


async def _aside(call: Call, served: Served, work: Any, read: Mapping[str, Array]) -> Any:
    """Return the result of work with a model's steps in a thread.

    Raises:
        IngotError: of the work, with the field that is wrong.
    """
    nbytes = sum(sum(map(len, array)) if array.dtype == object else array.nbytes for array in read.values())
    try:
        return await served.model.with_steps(work, nbytes, call.client)
    except IngotError as error:
        step = served.tokenize
        raise in_fields(
            error, {step.text: place_of(call.content, "inputs"), step.prompt: single("prompt_name")}
        ) from error
