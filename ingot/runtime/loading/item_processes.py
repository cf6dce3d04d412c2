"""The processes in which the steps of a model decode items: files of clients, and those of its goldens."""

from __future__ import annotations

from ingot.model_store import Variant
from ingot.runtime.engines.isolation.step_processes import StepProcesses
from ingot.runtime.machine.devices import cpu_count
from ingot.runtime.settings.settings import Settings
from ingot.steps import Apply, ItemStep, OpenedSteps

# Processes of a step, one item at a time in each.
_MOST = 4


def confined(variant: Variant, settings: Settings) -> tuple[OpenedSteps | None, list[StepProcesses]]:
    """Return the steps of a variant, of which those that decode items run in processes, and these processes.

    Raises:
        InvalidArchive: a file of the steps is missing or damaged.
        Unsupported: a package that a step needs is not installed.
    """
    decoding: list[StepProcesses] = []
    if settings.isolate == "none":
        return variant.opened_steps(), decoding

    def opened(step: ItemStep) -> Apply:
        decoding.append(processes_of(step, settings))
        return decoding[-1].apply

    return variant.opened_steps(opened), decoding


def processes_of(step: ItemStep, settings: Settings) -> StepProcesses:
    """Return the processes of a step; they start with its first items."""
    count = max(1, min(_MOST, cpu_count() // 2))
    return StepProcesses(step, count, settings.engine_memory_mb, settings.load_timeout)
