"""Decoders, which generate texts: the archive has no steps, but how a graph with a cache is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ingot.errors import InvalidArgument
from ingot.export.tasks.folder import Folder, Found
from ingot.tasks import Generating

_HEADS = ("ForCausalLM", "GPT2LMHeadModel")
# What models of a family are for.
_OF_FAMILY: Mapping[str, Generating] = {"marian": "translation", "pegasus": "summarization"}


def find_decoder(folder: Folder, *, named: bool) -> Found | None:
    """Return a decoder; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith(_HEADS):
        if named:
            raise folder.needs("text-generation", "a model ...ForCausalLM")
        return None

    return _found(folder, "text-generation")


def find_encoder_decoder(folder: Folder, *, named: bool, task: Generating) -> Found | None:
    """Return an encoder-decoder for texts; see :func:`ingot.export.tasks.find`.

    Args:
        folder: the model's.
        named: whether the user named the task.
        task: ``text2text-generation``, or what the model is for.
    """
    from transformers.models.auto import modeling_auto

    known: dict[str, str] = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if folder.architecture not in known.values():
        if named:
            raise folder.needs(task, "an encoder-decoder, such as T5ForConditionalGeneration")
        return None
    if not named and _OF_FAMILY.get(str(folder.config.get("model_type")), "text2text-generation") != task:
        return None
    return _found(folder, task)


def _found(folder: Folder, task: Generating) -> Found:
    def describe(module: Any) -> NoReturn:
        raise InvalidArgument(f"task {task} has no steps for another model; export {folder.path} itself")

    return Found(task, f"config: {folder.architecture}", folder.path, describe)
