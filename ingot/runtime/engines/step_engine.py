"""A step that decodes items, as the engine of an engine process."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter

from ingot.errors import InvalidArchive
from ingot.runtime.engines.engine import BaseEngine
from ingot.steps import AnyStep, ItemStep
from ingot.tensors import Array, DType, Signature, TensorSpec

ITEM = "item"


class StepEngine(BaseEngine):
    """Runs a step on the bytes of one item at a time: UINT8[bytes] to the item's named values.

    Args:
        content: the step, as JSON.

    Raises:
        InvalidArchive: the step does not decode items, or needs files.
        Unsupported: a package is missing.
    """

    platform = "ingot_step"
    device = "cpu"
    settings: Mapping[str, str] = {}

    def __init__(self, content: str):
        step = TypeAdapter[AnyStep](AnyStep).validate_json(content)
        if not isinstance(step, ItemStep) or step.files:
            raise InvalidArchive(f"step '{step.kind}' does not decode items")
        self.signature = Signature((TensorSpec(ITEM, DType.UINT8, ("bytes",)),), ())
        self._item = step.item()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {**self._item(inputs[ITEM].tobytes())}

    def terminate(self) -> None:
        """Have no effect: the time limit of a call ends its process."""

    def close(self) -> None:
        """Have no effect."""
