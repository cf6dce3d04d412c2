"""Models that find the answers to questions in texts, compared with the rule of transformers' pipeline.

transformers 5 has no QuestionAnsweringPipeline. The rule of version 4 is written here once more, on the encodings and
the function of document question answering, which transformers still has; the steps that run are in numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found
from ingot.export.tasks.tokenizer import FolderTokenizer
from ingot.steps import Described, Original, Values, question_answering
from ingot.steps.ragged import columns
from ingot.steps.samples import texts
from ingot.tensors import Array

# Tokens of a row, and those that two rows of a context share, at most: as the pipeline has them.
_LONGEST, _STRIDE = 384, 128
# Samples that are joined to one context, as long contexts have several rows.
_JOINED = 24
# Characters of a hard question, and the most tokens that these have, as bytes.
_CHARACTERS, _QUESTION = 5, 20


def find_questions(folder: Folder, *, named: bool) -> Found | None:
    """Return a model that answers questions; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForQuestionAnswering"):
        if named:
            raise folder.needs("question-answering", "a model ...ForQuestionAnswering")
        return None
    why = f"config: {folder.architecture}"
    return Found("question-answering", why, folder.path, lambda module: _describe(module, folder.path))


def _describe(module: Any, folder: Path) -> Described:
    tokenizer = FolderTokenizer(folder, module, max_length=_LONGEST)
    own, longest = tokenizer.own, tokenizer.max_length
    if own.padding_side != "right":
        raise Unsupported(
            f"the tokenizer in {folder} pads on the left, where questions follow their contexts; export the model "
            "without steps (--task none)"
        )
    stride = min(longest // 2, _STRIDE)
    # The longest rows of such a model may leave no room for a question and the stride.
    stride = min(stride, max(0, longest - own.num_special_tokens_to_add(pair=True) - _QUESTION - 1))
    rule = _Rule(own, longest, stride)
    cls = own.cls_token_id
    options = {**tokenizer.options, "stride": stride}
    described = question_answering(tokenizer.content, cls_id=-1 if cls is None else cls, **options)
    original = Original(
        f"{tokenizer.name} (answers by the rule of version 4)", rule.prepare, rule.answer, _items(), _samples()
    )
    return replace(described, original=original)


class _Rule:
    """What transformers 4 makes of questions and contexts."""

    def __init__(self, tokenizer: Any, longest: int, stride: int):
        self._own = tokenizer
        self._options = {"truncation": "only_second", "max_length": longest, "stride": stride}

    def _encoded(self, question: str | list[str], context: str | list[str], **options: Any) -> Any:
        return self._own(question, context, return_overflowing_tokens=True, **self._options, **options)

    def prepare(self, values: Values) -> Any:
        """Return the tensors of questions and contexts, a row for each window."""
        questions, contexts = ([item.decode() for item in values[name].tolist()] for name in ("question", "context"))
        return self._encoded(questions, contexts, padding=True, return_tensors="np")

    def answer(self, module: Any, values: Values) -> Values:
        """Return the best answers, the longest of which have 15 tokens."""
        pairs = [[item.decode() for item in values[name].tolist()] for name in ("question", "context")]
        rows = [self._best(module, question, context, 1) for question, context in zip(*pairs, strict=True)]
        return columns(
            rows,
            {
                "answer": (lambda item: item["answer"].encode(), object),
                "score": (itemgetter("score"), np.float32),
                "start": (itemgetter("start"), np.int32),
                "end": (itemgetter("end"), np.int32),
            },
        )

    def _best(self, module: Any, question: str, context: str, count: int) -> list[dict[str, Any]]:
        from transformers.pipelines.document_question_answering import select_starts_ends

        select: Any = select_starts_ends
        answers: list[dict[str, Any]] = []
        for encoding, first, last in self._run(module, question, context):
            outside = [[number != 1 for number in encoding.sequence_ids]]
            for place in np.flatnonzero(np.array(encoding.ids) == self._own.cls_token_id):
                outside[0][place] = False
            mask = np.array([encoding.attention_mask])
            starts, ends, scores, _ = select(first, last, np.array(outside, int), mask, 1e6, count * 2 + 10, False, 15)
            for start, end, score in zip(starts.tolist(), ends.tolist(), scores.tolist(), strict=True):
                begins, stops = _characters(encoding, start, end)
                text = context[begins:stops]
                known = next((each for each in answers if each["answer"].lower() == text.lower()), None)
                if known is not None:
                    known["score"] += score
                else:
                    answers.append({"score": score, "start": begins, "end": stops, "answer": text})
        return sorted(answers, key=lambda each: each["score"], reverse=True)[:count]

    def _run(self, module: Any, question: str, context: str) -> Iterator[tuple[Any, Array, Array]]:
        """Yield each window with its logits."""
        encoded = self._encoded(question, context)
        names = self._own.model_input_names
        for index, encoding in enumerate(encoded.encodings):
            inputs = {name: torch.tensor([encoded[name][index]]) for name in names if name in encoded}
            with torch.no_grad():
                found = module(**inputs)
            yield encoding, found["start_logits"].float().numpy(), found["end_logits"].float().numpy()


def _characters(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Return where the words of two tokens start and end, or the tokens themselves if they are in no word."""
    try:
        first, last = encoding.token_to_word(start), encoding.token_to_word(end)
        return encoding.word_to_chars(first, 1)[0], encoding.word_to_chars(last, 1)[1]
    except TypeError:  # there is no word
        return encoding.offsets[start][0], encoding.offsets[end][1]


def _items() -> list[dict[str, Array]]:
    """Return hard contexts, each with one of a few short questions."""
    contexts = [text for text in texts.hard() if text]
    known = [text[:_CHARACTERS] for text in texts.hard() if text]
    return [_pairs([known[7 * index % len(known)] for index in range(len(contexts))], contexts)]


def _samples() -> list[dict[str, Array]]:
    """Return questions, half of them with a long context."""
    usual = texts.samples()
    long = [" ".join(usual[index : index + _JOINED]) for index in range(len(usual) // 2)]
    contexts = [*usual[: len(usual) // 2], *long]
    return [_pairs([f"{text.split()[0]}?" for text in reversed(usual)], contexts)]


def _pairs(questions: list[str], contexts: list[str]) -> dict[str, Array]:
    return {"question": texts.as_array(questions), "context": texts.as_array(contexts)}
