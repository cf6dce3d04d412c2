"""Running a batch: join the requests, run the engine once, give each request its own rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.errors import IngotError, InternalError, Unavailable
from ingot.runtime.engine import Engine
from ingot.runtime.scheduler import Entry, Outcome
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)


def execute(engine: Engine, signature: Signature, entries: Sequence[Entry]) -> list[Outcome]:
    """Run entries as one batch and return one outcome each, in order.

    When a joined batch fails, its halves run apart, and so on, so that only a request that is to blame fails.
    """
    try:
        return list(_split(signature, entries, engine.run(_join(signature, entries))))
    except IngotError as error:
        if len(entries) == 1:
            return [error]
    except Exception:  # an engine's unforeseen failure must reach its requests, never end the thread that serves all
        log.exception("the engine failed on a batch of %d requests", len(entries))
        if len(entries) == 1:
            return [InternalError("the engine failed on this input")]
    middle = len(entries) // 2
    return [*_part(engine, signature, entries[:middle]), *_part(engine, signature, entries[middle:])]


def _part(engine: Engine, signature: Signature, entries: Sequence[Entry]) -> list[Outcome]:
    """Run a part of a failed batch without those whose client has left meanwhile."""
    staying = [entry for entry in entries if not entry.cancelled]
    outcomes = dict(zip(staying, execute(engine, signature, staying), strict=True)) if staying else {}
    return [outcomes.get(entry) or Unavailable("the client left") for entry in entries]


def rows_of(signature: Signature, inputs: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    """Return some rows of a request's inputs."""
    axes = signature.batch_axes(signature.inputs)
    return {
        name: array[(slice(None),) * axes[name] + (slice(start, stop),)] if name in axes else array
        for name, array in inputs.items()
    }


def _join(signature: Signature, entries: Sequence[Entry]) -> dict[str, Array]:
    if len(entries) == 1:
        return dict(entries[0].inputs)
    axes = signature.batch_axes(signature.inputs)
    return {
        name: np.concatenate([entry.inputs[name] for entry in entries], axis=axes[name]) if name in axes else array
        for name, array in entries[0].inputs.items()
    }


def _split(signature: Signature, entries: Sequence[Entry], outputs: dict[str, Array]) -> list[dict[str, Array]]:
    if len(entries) == 1:
        return [outputs]
    axes = signature.batch_axes(signature.outputs)
    total = sum(entry.rows for entry in entries)
    for name, array in outputs.items():
        if array.shape[axes[name]] != total:
            raise InternalError(f"output '{name}' has {array.shape[axes[name]]} rows for a batch of {total}")
    parts: list[dict[str, Array]] = []
    start = 0
    for entry in entries:
        rows = slice(start, start + entry.rows)
        parts.append({name: array[(slice(None),) * axes[name] + (rows,)] for name, array in outputs.items()})
        start += entry.rows
    return parts
