"""What the engine's process tells its fronts of the models that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import IngotError
from ingot.runtime import Model
from ingot.tensors import DType, Range, Signature, TensorSpec


@dataclass(frozen=True)
class ModelState:
    """One version of a model, as fronts describe it and check requests against it."""

    name: str
    version: str
    state: str
    ready: bool
    platform: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    signature: Signature | None = None

    @classmethod
    def of(cls, model: Model) -> ModelState:
        try:
            signature: Signature | None = model.signature
        except IngotError:  # it is not loaded yet
            signature = None
        return cls(
            model.name, model.version, model.state.value, model.ready, model.platform, model.properties, signature
        )

    @classmethod
    def loads(cls, content: Mapping[str, Any]) -> ModelState:
        signature = content["signature"]
        return cls(**{**content, "signature": None if signature is None else _signature(signature)})

    def dumps(self) -> dict[str, Any]:
        """Return what :meth:`loads` takes, ready for JSON."""
        return {
            "name": self.name,
            "version": self.version,
            "state": self.state,
            "ready": self.ready,
            "platform": self.platform,
            "properties": dict(self.properties),
            "signature": None if self.signature is None else _content(self.signature),
        }


def _content(signature: Signature) -> dict[str, Any]:
    return {
        "inputs": [[spec.name, spec.dtype.value, spec.shape] for spec in signature.inputs],
        "outputs": [[spec.name, spec.dtype.value, spec.shape] for spec in signature.outputs],
        "batch": signature.batch,
        "ranges": {name: [bounds.low, bounds.high, bounds.step] for name, bounds in signature.ranges.items()},
    }


def _signature(content: Mapping[str, Any]) -> Signature:
    def specs(side: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, DType(dtype), tuple(shape)) for name, dtype, shape in content[side])

    ranges = {name: Range(*bounds) for name, bounds in content["ranges"].items()}
    return Signature(specs("inputs"), specs("outputs"), content["batch"], ranges)
