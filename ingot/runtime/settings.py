"""How models are run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ingot.runtime import devices
from ingot.runtime.scheduling.scheduler import Limits

VariantChoice = Literal["measured", "preferred"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are run.

    ``device`` is ``auto``, ``cpu`` or ``cuda``; ``instances`` engines run side by side and share out the CPU cores.
    ``allow_code`` loads archives' variants of formats that can run code of whoever made them.
    ``ort_library`` is native code of custom operators for ONNX Runtime.
    ``variant_choice`` says which of an archive's variants is served where none is named: ``measured``, the fastest, or
    ``preferred``, the archive's first, of those that run here. ``choice_time`` is how many seconds each variant is
    timed at each batch size, if it must be. ``derived_cache`` keeps large models' packed weights beside their store.
    ``slo`` is in how many seconds requests that name no time of their own are to be answered; None is without limit.
    ``engine_threads`` is the number of CPU threads for one engine call; None has it measured.
    ``warm_time`` is how many seconds a model's batch sizes are timed before it is ready.
    """

    device: str = "auto"
    instances: int = 1
    limits: Limits = field(default_factory=Limits)
    allow_code: bool = False
    ort_library: Path | None = None
    variant_choice: VariantChoice = "measured"
    choice_time: float = 0.3
    derived_cache: bool = True
    slo: float | None = None
    warm_time: float = 0.1
    engine_threads: int | None = None

    @property
    def threads(self) -> int:
        """CPU threads for one engine call: as many as was said, or all that an instance may have."""
        return self.engine_threads or max(1, devices.cpu_count() // self.instances)
