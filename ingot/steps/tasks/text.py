"""The steps of the tasks on texts, as the export describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ingot.errors import NotFound
from ingot.steps.after.classify import Classify, Function
from ingot.steps.after.normalize import Normalize
from ingot.steps.after.pool import Mode, Pool
from ingot.steps.pipeline import AnyStep
from ingot.steps.tasks.described import BATCH, Described, best_classes, described, options_checked, split
from ingot.steps.tokenize import Tokenize
from ingot.tensors import DType, TensorSpec

_COUNTS = (TensorSpec("tokens", DType.INT32, (BATCH,)), TensorSpec("cut_tokens", DType.INT32, (BATCH,)))


@options_checked
def text_classification(
    tokenizer: str | Path | bytes,
    labels: Sequence[str],
    *,
    function: Function = "softmax",
    top_k: int = 0,
    logits: str = "logits",
    pair: Literal["", "optional", "required"] = "optional",
    **options: Any,
) -> Described:
    """Describe the steps of a classifier of texts, or of pairs of texts.

    Examples:
        >>> steps = ingot.steps.text_classification("./tokenizer.json", ["NEGATIVE", "POSITIVE"], max_length=128)
        >>> archive = ingot.export_model(net, inputs="input_ids:int64[batch,seq]", steps=steps, name="sst2")

    Args:
        tokenizer: ``tokenizer.json``, the folder that has it, or its content.
        labels: the names of classes, in the order of the logits.
        function: what makes scores of logits, unless a request chooses another in the input ``function_to_apply``.
        top_k: classes that are returned, best first; 0 for all.
        logits: the graph's output.
        pair: whether requests may, or must, have a second text in the input ``text_pair``.
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`, such as ``max_length``.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    choice = TensorSpec("function_to_apply", DType.BYTES, (BATCH,))
    after = Classify(logits=logits, function=function, labels=tuple(labels), top_k=top_k, choice=choice.name)
    answers = best_classes(after)
    return on_texts(
        "text-classification", tokenizer, lambda _: (after,), answers, options, pair=pair, choices=(choice,)
    )


@options_checked
def text_ranking(
    tokenizer: str | Path | bytes,
    *,
    classes: int = 1,
    function: Function | None = None,
    logits: str = "logits",
    **options: Any,
) -> Described:
    """Describe the steps of a cross-encoder, which scores pairs of texts: inputs ``text`` and ``text_pair``.

    Args:
        tokenizer: as for :func:`text_classification`.
        classes: scores of a pair.
        function: by default sigmoid for one score, and none for several, as sentence-transformers has it.
        logits: the graph's output.
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.
    """
    after = Classify(logits=logits, function=function or ("sigmoid" if classes == 1 else "none"))
    answer = TensorSpec(after.score, DType.FP32, (BATCH,) if classes == 1 else (BATCH, classes))
    return on_texts("text-ranking", tokenizer, lambda _: (after,), (answer,), options, pair="required")


@options_checked
def embedding(
    tokenizer: str | Path | bytes,
    size: int,
    *,
    pooling: Mode | Sequence[Mode] = "mean",
    normalize: bool = False,
    further: Sequence[AnyStep] = (),
    files: Mapping[str, bytes] | None = None,
    tokens: str = "last_hidden_state",
    **options: Any,
) -> Described:
    """Describe the steps of an embedding of texts.

    Args:
        tokenizer: as for :func:`text_classification`.
        size: elements of a vector.
        pooling: one or more modes; the results of several are concatenated.
        normalize: whether vectors have the length 1.
        further: steps after pooling, instead of ``normalize``.
        files: the files that these need.
        tokens: the graph's output, a vector for each token.
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`, such as ``prompts``.
    """
    modes: tuple[Mode, ...] = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    pool = Pool(modes=modes, tokens=tokens, attention_mask=options.get("attention_mask", "attention_mask"))
    after: list[AnyStep] = [pool, *further, *([Normalize()] if normalize else [])]
    answer = TensorSpec(pool.output, DType.FP32, (BATCH, size))
    return on_texts("sentence-similarity", tokenizer, lambda _: after, (answer,), options, files=files)


def on_texts(
    task: str,
    tokenizer: str | Path | bytes,
    after: Callable[[Tokenize], Sequence[AnyStep]],
    answers: Sequence[TensorSpec],
    options: Mapping[str, Any],
    *,
    pair: Literal["", "optional", "required"] = "",
    choices: Sequence[TensorSpec] = (),
    files: Mapping[str, bytes] | None = None,
) -> Described:
    """Describe the steps of a task on texts.

    Args:
        task: its name.
        tokenizer: as for :func:`text_classification`.
        after: returns the steps after the graph.
        answers: what they return.
        options: fields of :class:`~ingot.steps.tokenize.Tokenize`.
        pair: whether requests may, or must, have a second text; its input is ``text_pair`` unless an option names it.
        choices: further raw inputs, which requests may leave out.
        files: what the steps after the graph need.

    Raises:
        NotFound: there is no such tokenizer.
        InvalidArgument: an option is wrong.
    """
    content = tokenizer if isinstance(tokenizer, bytes) else _content(Path(tokenizer))
    defaults = {} if isinstance(tokenizer, bytes) else _pads(content)
    fields, _ = split(task, options, Tokenize)
    second = {"pair": options.get("pair", "text_pair") if pair else ""}
    before = Tokenize(**{**defaults, **fields, **second})
    prompt = [before.prompt] if before.prompts else []
    names = [before.text, *([before.pair] if pair else []), *prompt]
    optional = [*([before.pair] if pair == "optional" else []), *prompt, *(spec.name for spec in choices)]
    return described(
        task,
        (*(TensorSpec(name, DType.BYTES, (BATCH,)) for name in names), *choices),
        before,
        after(before),
        (*answers, *_COUNTS),
        optional=optional,
        files={before.file: content, **(files or {})},
    )


def _content(path: Path) -> bytes:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise NotFound(f"there is no tokenizer {file}; save one with tokenizer.save_pretrained(FOLDER)")
    return file.read_bytes()


def _pads(content: bytes) -> dict[str, Any]:
    """Return the padding that a tokenizer's file states, if it does."""
    try:
        padding = json.loads(content).get("padding") or {}
    except (ValueError, AttributeError):
        return {}  # reading the tokenizer reports the fault
    side = str(padding.get("direction", "Right")).lower()
    return {"pad_id": padding.get("pad_id", 0), "pad_type": padding.get("pad_type_id", 0), "padding_side": side}
