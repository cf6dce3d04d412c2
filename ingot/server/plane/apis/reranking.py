"""``/rerank`` as text-embeddings-inference, Jina and Cohere have it, distinguished by the names of the fields.

``texts`` are text-embeddings-inference's; ``documents`` are Jina's and Cohere's, whose answers have the fields of both.
"""

from __future__ import annotations

import uuid
from typing import Any

from ingot.errors import IngotError, InvalidField, quoted
from ingot.server.plane.apis import asking, tei
from ingot.server.plane.fields import Fields, check_count
from ingot.server.plane.handlers import Call


async def rerank(call: Call) -> Any:
    """Return how well texts answer a query, best first.

    Raises:
        InvalidField: a field is wrong.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    fields = Fields(call.content)
    texts, documents = (call.content.get(name) is not None for name in ("texts", "documents"))
    if texts and documents:
        raise InvalidField("documents", "and 'texts' are both given; send one of them")
    return await (_texts(call, fields) if texts else _documents(call, fields))


async def _texts(call: Call, fields: Fields) -> list[dict[str, Any]]:
    served = asking.chosen(call, asking.RANKING)
    texts = fields.texts("texts", served.steps.max_items)
    fields.any("documents")  # null
    query, returned = fields.text("query"), fields.flag("return_text")
    if fields.flag("raw_scores"):
        raise InvalidField("raw_scores", "is true; the model's steps make scores of logits, so leave it out")
    truncate = tei.truncation(fields, served)
    fields.end()
    found, _ = await asking.scores(call, served, query, texts, truncate=truncate, field="texts")
    return [
        {"index": index, "score": found[index], **({"text": texts[index]} if returned else {})}
        for index in _best(found)
    ]


async def _documents(call: Call, fields: Fields) -> dict[str, Any]:
    query, given, name = fields.text("query"), fields.any("documents"), fields.text("model", "")
    count, returned = fields.count("top_n"), fields.flag("return_documents")
    fields.any("texts")  # null
    if (ranked := fields.any("rank_fields")) not in (None, ["text"]):
        raise InvalidField("rank_fields", f"is {quoted(ranked)}; documents are ranked by their field 'text' only")
    served = asking.chosen(call, asking.RANKING, named=name)
    longest = served.tokenize.max_length
    if 0 < (most := fields.count("max_tokens_per_doc")) < longest:
        raise InvalidField("max_tokens_per_doc", f"is {most}; the model cuts pairs at {longest} tokens; leave it out")
    truncate = tei.truncation(fields, served)
    fields.end()
    texts = _contents(given, served.steps.max_items)
    found, answer = await asking.scores(call, served, query, texts, truncate=truncate, field="documents")
    results = [
        {"index": index, "relevance_score": found[index], **({"document": {"text": texts[index]}} if returned else {})}
        for index in _best(found)[: count or None]
    ]
    usage = {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens}
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return {"id": str(uuid.uuid4()), "model": served.model.name, "results": results, "usage": usage, "meta": meta}


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, with the fields of all three APIs."""
    status, content = tei.refusal(error)
    return status, {**content, "message": content["error"], "detail": content["error"]}


def _best(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def _contents(given: Any, most: int) -> list[str]:
    """Return the texts of documents, each a text or an object with the field ``text``."""
    check_count("documents", given, most)
    if isinstance(given, list):
        given = [item["text"] if isinstance(item, dict) and "text" in item else item for item in given]
    return Fields({"documents": given}).texts("documents", most)
