"""The steps of the tasks on sounds, as the export describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.steps.after.classify import Classify
from ingot.steps.after.ctc import Ctc
from ingot.steps.sounds.audio import Audio
from ingot.steps.tasks.described import BATCH, Described, best_classes, described, options_checked, split
from ingot.tensors import DType, TensorSpec

_MOST_ITEMS = 64


@options_checked
def audio_classification(labels: Sequence[str], *, rate: int, **options: Any) -> Described:
    """Describe the steps of a classifier of sounds.

    Examples:
        >>> steps = ingot.steps.audio_classification(["bark", "purr"], rate=16000)
        >>> archive = ingot.export_model(net, inputs="input_values:float32[batch,samples]", steps=steps, name="pets")

    Args:
        labels: the names of classes, in the order of the logits.
        rate: of the model's samples, in Hz; sounds of another rate are resampled.
        options: fields of :class:`~ingot.steps.sounds.audio.Audio`, such as ``operations``, ``attention_mask``,
            ``limits``, and ``values``, the graph's input, and of :class:`~ingot.steps.after.classify.Classify`, such
            as ``top_k``.

    Raises:
        InvalidArgument: an option is wrong.
    """
    task = "audio-classification"
    audio, options = split(task, options, Audio, Classify)
    classify = Classify(labels=tuple(labels), **options)
    return _described(task, Audio(rate=rate, **audio), classify, best_classes(classify))


@options_checked
def speech_recognition(tokens: Sequence[str], *, rate: int, **options: Any) -> Described:
    """Describe the steps of a recognizer of speech that was trained with CTC.

    Args:
        tokens: their texts, in the order of the logits.
        rate: of the model's samples, in Hz; sounds of another rate are resampled.
        options: fields of :class:`~ingot.steps.sounds.audio.Audio`, such as ``operations`` and ``attention_mask``,
            and of :class:`~ingot.steps.after.ctc.Ctc`, such as ``blank`` and ``delimiter``. With ``attention_mask``
            the model's ``convolutions`` are needed.

    Raises:
        InvalidArgument: an option is wrong.
    """
    task = "automatic-speech-recognition"
    audio, options = split(task, options, Audio, Ctc)
    if audio.get("attention_mask"):
        audio.setdefault("sizes", "sizes")
    ctc = Ctc(tokens=tuple(tokens), sizes=audio.get("sizes", ""), **options)
    answers = (TensorSpec(ctc.text, DType.BYTES, (BATCH,)),)
    return _described(task, Audio(rate=rate, **audio), ctc, answers)


def _described(task: str, audio: Audio, after: Classify | Ctc, answers: Sequence[TensorSpec]) -> Described:
    counts = (TensorSpec(audio.seconds, DType.FP32, (BATCH,)), TensorSpec(audio.cut, DType.FP32, (BATCH,)))
    inputs = (TensorSpec(audio.audio, DType.BYTES, (BATCH,)),)
    return described(task, inputs, audio, (after,), (*answers, *counts), max_items=_MOST_ITEMS)
