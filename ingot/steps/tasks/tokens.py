"""The steps of the tasks on the tokens of texts, as the export describes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.steps.after.entities import Aggregation, Entities
from ingot.steps.after.fill import Fill
from ingot.steps.after.span import Span
from ingot.steps.after.vectors import Vectors
from ingot.steps.tasks.described import BATCH, Described, options_checked
from ingot.steps.tasks.text import on_texts
from ingot.tensors import DType, TensorSpec


@options_checked
def token_classification(
    tokenizer: str | Path | bytes,
    labels: Sequence[str],
    *,
    aggregation: Aggregation = "simple",
    ignored: Sequence[str] = ("O",),
    unknown_id: int = -1,
    logits: str = "logits",
    **options: Any,
) -> Described:
    """Describe the steps of a model that finds entities in texts.

    Args:
        tokenizer: as for :func:`~ingot.steps.tasks.text.text_classification`.
        labels: the names of the tokens' classes, in the order of the logits.
        aggregation: how tokens become entities, unless a request chooses in the input ``aggregation_strategy``; see
            :class:`~ingot.steps.after.entities.Entities`.
        ignored: labels that are left out.
        unknown_id: the token of unknown words, whose text is taken from the original; -1 for none.
        logits: the graph's output, float[batch, seq, classes].
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    choice = TensorSpec("aggregation_strategy", DType.BYTES, (BATCH,))

    def after(before: Any) -> tuple[Entities]:
        named = {"file": before.file, "text": before.text, "ids": before.ids, "choice": choice.name}
        return (
            Entities(
                labels=tuple(labels),
                logits=logits,
                aggregation=aggregation,
                ignored=tuple(ignored),
                unknown_id=unknown_id,
                **named,
            ),
        )

    rows = (BATCH, "entities")
    answers = (
        TensorSpec("entity", DType.BYTES, rows),
        TensorSpec("score", DType.FP32, rows),
        TensorSpec("word", DType.BYTES, rows),
        *(TensorSpec(name, DType.INT32, rows) for name in ("start", "end", "index")),
        TensorSpec("count", DType.INT32, (BATCH,)),
    )
    options = {"details": True, **options}
    return on_texts("token-classification", tokenizer, after, answers, options, choices=(choice,))


@options_checked
def question_answering(
    tokenizer: str | Path | bytes,
    *,
    max_length: int = 384,
    stride: int | None = None,
    top_k: int = 1,
    max_answer_len: int = 15,
    words: bool = True,
    cls_id: int = -1,
    outputs: tuple[str, str] = ("start_logits", "end_logits"),
    **options: Any,
) -> Described:
    """Describe the steps of a model that finds the answers to questions in texts: inputs ``question`` and ``context``.

    Args:
        tokenizer: as for :func:`~ingot.steps.tasks.text.text_classification`.
        max_length: tokens of a row; a longer context becomes several.
        stride: tokens that consecutive rows of a context share; by default a half of ``max_length``, 128 at most.
        top_k: answers, unless a request chooses in the input ``top_k``.
        max_answer_len: tokens of an answer, at most.
        words: whether answers are extended to whole words.
        cls_id: the token that stands for no answer; -1 for none.
        outputs: the graph's logits of first and last tokens, float[batch, seq].
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    choice = TensorSpec("top_k", DType.INT32, (BATCH,))

    def after(before: Any) -> tuple[Span]:
        named = {
            "context": before.pair,
            "ids": before.ids,
            "attention_mask": before.attention_mask,
            "choice": choice.name,
        }
        first, last = outputs
        return (
            Span(
                first=first,
                last=last,
                top_k=top_k,
                max_answer_len=max_answer_len,
                words=words,
                cls_id=cls_id,
                **named,
            ),
        )

    rows = (BATCH, "answers")
    answers = (
        TensorSpec("answer", DType.BYTES, rows),
        TensorSpec("score", DType.FP32, rows),
        *(TensorSpec(name, DType.INT32, rows) for name in ("start", "end")),
        TensorSpec("count", DType.INT32, (BATCH,)),
    )
    windows = {"max_length": max_length, "stride": min(max_length // 2, 128) if stride is None else stride}
    options = {"details": True, "text": "question", "pair": "context", **windows, **options}
    return on_texts("question-answering", tokenizer, after, answers, options, pair="required", choices=(choice,))


@options_checked
def fill_mask(
    tokenizer: str | Path | bytes,
    mask_id: int,
    *,
    top_k: int = 5,
    clean_up: bool = False,
    logits: str = "logits",
    **options: Any,
) -> Described:
    """Describe the steps of a model that finds missing words.

    Args:
        tokenizer: as for :func:`~ingot.steps.tasks.text.text_classification`.
        mask_id: the token that stands for a missing word.
        top_k: words for each mask, unless a request chooses in the input ``top_k``.
        clean_up: whether blanks before punctuation are removed from the filled texts.
        logits: the graph's output, float[batch, seq, vocabulary].
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    choice = TensorSpec("top_k", DType.INT32, (BATCH,))

    def after(before: Any) -> tuple[Fill]:
        named = {"file": before.file, "text": before.text, "ids": before.ids, "attention_mask": before.attention_mask}
        fill = Fill(
            mask_id=mask_id,
            pad_id=before.pad_id,
            logits=logits,
            choice=choice.name,
            top_k=top_k,
            clean_up=clean_up,
            **named,
        )
        return (fill,)

    rows = (BATCH, "masks", "words")
    answers = (
        TensorSpec("token", DType.INT64, rows),
        TensorSpec("token_str", DType.BYTES, rows),
        TensorSpec("score", DType.FP32, rows),
        TensorSpec("sequence", DType.BYTES, rows),
        TensorSpec("count", DType.INT32, (BATCH,)),
    )
    return on_texts("fill-mask", tokenizer, after, answers, options, choices=(choice,))


@options_checked
def feature_extraction(
    tokenizer: str | Path | bytes, size: int, *, output: str = "last_hidden_state", **options: Any
) -> Described:
    """Describe the steps of a model that returns a vector for each token, of which ``tokens`` has the number.

    Args:
        tokenizer: as for :func:`~ingot.steps.tasks.text.text_classification`.
        size: elements of a vector.
        output: the graph's output, float[batch, seq, size].
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    answers = (TensorSpec("vectors", DType.FP32, (BATCH, "longest", size)),)
    return on_texts(
        "feature-extraction",
        tokenizer,
        lambda before: (Vectors(tokens=output, attention_mask=before.attention_mask),),
        answers,
        options,
    )
