"""Documents inside model files: the plan of a partitioned model, and the header of PyTorch files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.tensors import Signature


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")


class TorchHeader(_Record):
    """A header in files of PyTorch, whose formats preserve neither the names of tensors nor their ranges.

    ``operators`` are the required operators outside of PyTorch, such as ``acme::norm``.
    """

    torch: str
    signature: Signature
    operators: tuple[str, ...] = ()


class Segment(_Record):
    """One step of a :class:`PartitionPlan`: a model, and the names of its input and output values."""

    format: Literal["onnx", "pt2"]
    blob: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PartitionPlan(_Record):
    """A model in parts that run one after the other.

    A value has the name of a model input, or a name that the plan defines. ``outputs`` are the values of the model's
    outputs, in the order of the signature.
    """

    schema_version: Literal[1] = 1
    signature: Signature
    segments: tuple[Segment, ...] = Field(min_length=1, max_length=1000)
    outputs: tuple[str, ...]

    @model_validator(mode="after")
    def _flows(self) -> PartitionPlan:
        known = {spec.name for spec in self.signature.inputs}
        for segment in self.segments:
            if not known.issuperset(segment.inputs):
                raise ValueError("a segment uses a value that no earlier segment produces")
            if known.intersection(segment.outputs):
                raise ValueError("a segment produces a value that exists already")
            known.update(segment.outputs)
        if not known.issuperset(self.outputs) or len(self.outputs) != len(self.signature.outputs):
            raise ValueError("its outputs are not values of its segments, one for each output of the signature")
        return self
