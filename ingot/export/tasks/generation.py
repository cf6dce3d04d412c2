"""Decoders, which generate texts: the archive has no steps, but how a graph with a cache is run."""

from __future__ import annotations

from typing import Any, NoReturn

from ingot.errors import InvalidArgument
from ingot.export.tasks.folder import Folder, Found

_HEADS = ("ForCausalLM", "GPT2LMHeadModel")


def find_decoder(folder: Folder, *, named: bool) -> Found | None:
    """Return a decoder; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith(_HEADS):
        if named:
            raise folder.needs("text-generation", "a model ...ForCausalLM")
        return None

    def describe(module: Any) -> NoReturn:
        raise InvalidArgument(f"task text-generation has no steps for another model; export {folder.path} itself")

    return Found("text-generation", f"config: {folder.architecture}", folder.path, describe)
