"""The steps of the tasks on sounds, as the export describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import InvalidArgument
from ingot.steps.after.classify import Classify
from ingot.steps.after.ctc import Ctc
from ingot.steps.pipeline import AnyStep, Steps
from ingot.steps.sounds.audio import Audio
from ingot.steps.text import BATCH, Described
from ingot.tensors import DType, TensorSpec

_MOST_ITEMS = 64


def audio_classification(labels: Sequence[str], *, rate: int, **options: Any) -> Described:
    """Describe the steps of a classifier of sounds.

    Examples:
        >>> steps = ingot.steps.audio_classification(["bark", "purr"], rate=16000)
        >>> archive = ingot.export_model(net, inputs="input_values:float32[batch,samples]", steps=steps, name="pets")

    Args:
        labels: the names of classes, in the order of the logits.
        rate: of the model's samples, in Hz; sounds of another rate are resampled.
        options: fields of :class:`~ingot.steps.sounds.audio.Audio`, such as ``operations``, ``mask``, ``limits``, and
            ``values``, the graph's input, and of :class:`~ingot.steps.after.classify.Classify`, such as ``top_k``.

    Raises:
        InvalidArgument: an option is wrong.
    """
    audio, options = _split(options, Classify, "a classifier of sounds")
    classify = Classify(labels=tuple(labels), **options)
    shape = (BATCH, classify.count)
    answers = (TensorSpec(classify.label, DType.BYTES, shape), TensorSpec(classify.score, DType.FP32, shape))
    return _described("audio-classification", Audio(rate=rate, **audio), classify, answers)


def speech_recognition(tokens: Sequence[str], *, rate: int, **options: Any) -> Described:
    """Describe the steps of a recognizer of speech that was trained with CTC.

    Args:
        tokens: their texts, in the order of the logits.
        rate: of the model's samples, in Hz; sounds of another rate are resampled.
        options: fields of :class:`~ingot.steps.sounds.audio.Audio`, such as ``operations`` and ``mask``, and of
            :class:`~ingot.steps.after.ctc.Ctc`, such as ``blank`` and ``delimiter``. With ``mask`` the model's
            ``convolutions`` are needed.

    Raises:
        InvalidArgument: an option is wrong.
    """
    audio, options = _split(options, Ctc, "a recognizer of speech")
    if audio.get("mask"):
        audio.setdefault("sizes", "sizes")
    ctc = Ctc(tokens=tuple(tokens), sizes=audio.get("sizes", ""), **options)
    answers = (TensorSpec(ctc.text, DType.BYTES, (BATCH,)),)
    return _described("automatic-speech-recognition", Audio(rate=rate, **audio), ctc, answers)


def _split(options: Mapping[str, Any], after: type[AnyStep], what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the step before the graph, and of the one after it."""
    if unknown := options.keys() - Audio.model_fields.keys() - after.model_fields.keys():
        known = ", ".join(dict.fromkeys((*Audio.model_fields, *after.model_fields)))
        raise InvalidArgument(f"'{min(unknown)}' is not an option of {what}: {known}")
    before = {name: value for name, value in options.items() if name in Audio.model_fields}
    return before, {name: value for name, value in options.items() if name not in before}


def _described(task: str, audio: Audio, after: Classify | Ctc, answers: Sequence[TensorSpec]) -> Described:
    counts = (TensorSpec(audio.seconds, DType.FP32, (BATCH,)), TensorSpec(audio.cut, DType.FP32, (BATCH,)))
    steps = Steps(
        task=task,
        inputs=(TensorSpec(audio.audio, DType.BYTES, (BATCH,)),),
        outputs=(*answers, *counts),
        before=(audio,),
        after=(after,),
        max_items=_MOST_ITEMS,
    )
    return Described(steps)
