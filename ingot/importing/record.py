"""The results of readers: models that can be imported, and one model read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from ingot.errors import ALLOW_CODE, InvalidArgument
from ingot.tensors import Dim, DType, TensorSpec

BATCH = "batch"
ModelFormat = Literal["onnx", "torchscript", "pt2", "state_dict"]
"""The format of a serialized model: graph, TorchScript, exported program, or weights for a Python class."""


@dataclass(frozen=True)
class Declared:
    """An input as another server's configuration declares it, without names for its dynamic dimensions.

    ``sizes`` excludes the batch and has None for dynamic dimensions; ``batched`` adds a batch dimension in front.
    """

    name: str
    dtype: DType
    sizes: tuple[int | None, ...]
    batched: bool


@dataclass(frozen=True)
class Consent:
    """The user's consent, and whether options describe the inputs.

    Args:
        allow_code: the model's own code may be run.
        without_handler: a custom handler may be dropped.
        described: the inputs are described, so that a refusal need not ask for them.
    """

    allow_code: bool = False
    without_handler: bool = False
    described: bool = False

    def need_code(self, why: str) -> None:
        """Raise InvalidArgument unless code may be run; ``why`` names the code and the reason."""
        if not self.allow_code:
            raise InvalidArgument(f"{why}; {ALLOW_CODE}")


@dataclass(frozen=True)
class Imported:
    """One model, read.

    Args:
        called: the serialized model in messages, such as ``'model.pt' in densenet.mar``.
        format: its format.
        file: its path.
        inputs: the declared inputs; empty if the source declares none.
        outputs: the names of the outputs, in order; empty if the source does not declare them.
        code: the Python file that defines the class, for ``state_dict``.
        documents: small files that came with it, by name.
        notes: what is not imported, and why.
    """

    called: str
    format: ModelFormat
    file: Path
    _: KW_ONLY
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[str, ...] = ()
    code: Path | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A model that can be imported; ``called`` is its name in the source, ``version`` None if the source has none.

    ``read`` reads it, and raises ``InvalidArgument`` or ``NotFound`` if it is damaged or not supported. Its result
    is valid until the block of :func:`ingot.importing.candidates` ends.
    """

    where: str
    name: str
    version: str | None
    read: Callable[[], Imported]
    _: KW_ONLY
    called: str = ""


def specs(declared: Iterable[Declared], known: Iterable[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return specs of declared inputs.

    Args:
        declared: the inputs.
        known: the inputs in the model's file, if it has any: their names of dynamic dimensions are kept, so that
            inputs can share one. Otherwise each dynamic dimension gets its own name.
    """
    by_name = {spec.name: spec for spec in known}
    return tuple(_spec(item, by_name.get(item.name)) for item in declared)


def _spec(item: Declared, known: TensorSpec | None) -> TensorSpec:
    first: list[Dim] = [BATCH] if item.batched else []
    rank = len(first) + len(item.sizes)
    names: Sequence[Dim | None] = known.shape if known is not None and len(known.shape) == rank else [None] * rank
    rest = (_dim(item.name, axis, size, names[axis]) for axis, size in enumerate(item.sizes, len(first)))
    return TensorSpec(item.name, item.dtype, (*first, *rest))


def _dim(tensor: str, axis: int, size: int | None, known: Dim | None) -> Dim:
    if size is not None:
        return size
    return known if known is not None else f"{re.sub(r'[^A-Za-z0-9_]', '_', tensor)}_{axis}"
