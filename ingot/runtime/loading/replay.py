"""The replay of a variant's goldens without a server."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ingot.errors import InternalError, InvalidArchive
from ingot.model_store import Variant
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.settings.settings import Settings


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        variant: its name.
        cases: the goldens, of tensors and of raw inputs.
        raw: those of raw inputs, which also the steps reproduce.
        largest: the largest departure, see :func:`ingot.tensors.arrays.departure`.
        tolerance: the most that is accepted.
    """

    variant: str
    cases: int
    raw: int
    largest: float
    tolerance: float


def replay(variant: Variant) -> Replay:
    """Replay the goldens of a variant, whose blobs are files, as a server on this machine does before it serves.

    Raises:
        InvalidArchive: the outputs or answers differ, or the goldens are damaged.
        Unsupported: no engine runs the variant here, or its format can run its author's code.
    """
    settings = Settings(device="cpu")
    spec = LoadSpec.of_variant(variant, settings)
    with contextlib.ExitStack() as stack:
        for processes in spec.decoding:
            stack.callback(processes.close)
        engine = stack.enter_context(contextlib.closing(spec.open("cpu", settings.threads)))
        try:
            largest = spec.replay(engine.run, variant.serving.name)
        except InternalError as error:
            raise InvalidArchive(f"variant '{variant.name}': {error}") from error
    raw = sum(bool(case.raw) for case in spec.goldens)
    return Replay(variant.name, len(spec.goldens), raw, largest, spec.tolerance)
