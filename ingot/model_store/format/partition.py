"""Documents inside model files: the plans of partitioned models and of models in Python, and PyTorch's header."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ingot.errors import shortened
from ingot.permissions import Permission
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


_Blob = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Segment(_Record):
    """One step of a :class:`PartitionPlan`: a model, and the names of its input and output values."""

    format: Literal["onnx", "pt2"]
    blob: _Blob
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


# Bytes of the path of a file, which the folder that it is unpacked into makes longer, and of each part of it.
_MOST_PATH, _MOST_PART = 1024, 255


class PythonPlan(_Record):
    """A model that is code in Python.

    Attributes:
        interface: ``class``, or ``torchserve`` for a handler of TorchServe.
        file: the file that has the class or the handler; one of ``files``.
        attribute: the name of the class, or of the handler's function, which it may lack.
        files: the blob of each file by its path, relative to the folder of ``file``.
        requirements: versions of packages, each as ``name==version``.
        hashes: of the files that may be installed for a requirement, each as ``sha256:`` and hexadecimal digits.
        wheels: the blob of each wheel that the archive holds, by the name of its file.
        permissions: what the model does besides computing, which its server must permit.
        python: the version of the interpreter that made the archive.
    """

    schema_version: Literal[1] = 1
    interface: Literal["class", "torchserve"] = "class"
    file: str
    attribute: str = Field(pattern=r"^[A-Za-z_]\w*$")
    files: dict[str, _Blob] = Field(min_length=1, max_length=10_000)
    requirements: tuple[str, ...] = Field((), max_length=1000)
    hashes: dict[str, tuple[Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")], ...]] = {}
    wheels: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+!\-]*\.whl$", max_length=255)], _Blob] = {}
    permissions: tuple[Permission, ...] = ()
    python: str = ""

    @field_validator("requirements")
    @classmethod
    def _pinned(cls, requirements: tuple[str, ...]) -> tuple[str, ...]:
        for requirement in requirements:
            if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*==[\w.+!\-]+", requirement):
                raise ValueError(f"'{requirement}' is not of the form name==version")
        return requirements

    @model_validator(mode="after")
    def _hashed(self) -> PythonPlan:
        if self.hashes and {*self.hashes} != {*self.requirements}:
            raise ValueError("its hashes are not those of its requirements")
        return self

    @model_validator(mode="after")
    def _relative(self) -> PythonPlan:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or not path.parts or "\0" in name:
                raise ValueError(f"'{shortened(name)}' is not a path inside the model's folder")
            if len(name.encode()) > _MOST_PATH or any(len(part.encode()) > _MOST_PART for part in path.parts):
                raise ValueError(f"'{shortened(name)}' is longer than file systems allow")
            if above := next((parent for parent in path.parents if str(parent) in self.files), None):
                raise ValueError(f"'{shortened(str(above))}' is a file, and the folder of '{shortened(name)}'")
        if self.file not in self.files:
            raise ValueError(f"it has no file '{self.file}'")
        return self
