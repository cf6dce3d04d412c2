"""The results of readers: models that can be imported, and one model read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from ingot.errors import ALLOW_CODE, InvalidArgument
from ingot.importing.recognition.form import Form
from ingot.model_store import ServingDefaults
from ingot.tensors import Dim, DType, TensorSpec

BATCH = "batch"
ModelFormat = Literal["onnx", "torchscript", "pt2", "state_dict", "python"]
"""The format of a model: graph, TorchScript, exported program, weights for a Python class, or code in Python."""


@dataclass(frozen=True)
class Declared:
    """An input or output as another server's configuration declares it, without names for its dynamic dimensions.

    ``sizes`` excludes the batch and has None for dynamic dimensions; ``batched`` adds a batch dimension in front.
    ``inner`` are the sizes of the model's own tensor, if the server reshapes it. ``control`` is whether the server
    fills the input in, with a value for each sample, whatever the rank. An output has no ``dtype``.
    """

    name: str
    dtype: DType | None
    sizes: tuple[int | None, ...]
    batched: bool
    _: KW_ONLY
    inner: tuple[int | None, ...] | None = None
    optional: bool = False
    control: bool = False


@dataclass(frozen=True)
class Consent:
    """The user's consent, and whether options describe the inputs.

    Args:
        allow_code: the model's own code may be run.
        without_handler: the handler is dropped, a custom one too.
        without_code: the handler must become steps.
        described: the inputs are described, so that a refusal need not ask for them.
        permissions: what a custom handler may do besides computing.
    """

    allow_code: bool = False
    without_handler: bool = False
    _: KW_ONLY
    without_code: bool = False
    described: bool = False
    permissions: tuple[str, ...] = ()

    def need_code(self, why: str) -> None:
        """Raise InvalidArgument unless code may be run; ``why`` names the code and the reason."""
        if not self.allow_code:
            raise InvalidArgument(f"{why}; {ALLOW_CODE}")


@dataclass(frozen=True)
class CustomHandler:
    """A custom handler of TorchServe.

    Args:
        folder: its unpacked archive.
        file: the name of its file in that.
        function: the name of its function, which it may lack.
        requirements: versions of packages, each as ``name==version``.
        permissions: what it does besides computing.
    """

    folder: Path
    file: str
    function: str
    requirements: tuple[str, ...]
    permissions: tuple[str, ...]


@dataclass(frozen=True)
class Imported:
    """One model, read.

    Args:
        called: the serialized model in messages, such as ``'model.pt' in densenet.mar``.
        format: its format.
        file: its path.
        inputs: the declared inputs; empty if the source declares none.
        outputs: the outputs, in order; empty if the source does not declare them.
        serving: names of classes, states and controls.
        handler: the handler that becomes steps, by its name or file; empty for none.
        form: what a custom handler does that becomes steps.
        tokenizer: the content of ``tokenizer.json`` that such a handler reads.
        custom: the custom handler, for ``python``.
        instead: reads the model with its handler as it is, if it becomes no steps.
        code: the Python file that defines the class, for ``state_dict``.
        documents: small files that came with it, by name.
        notes: what is not imported, and why.
    """

    called: str
    format: ModelFormat
    file: Path
    _: KW_ONLY
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()
    serving: ServingDefaults | None = None
    handler: str = ""
    form: Form | None = None
    tokenizer: bytes = b""
    custom: CustomHandler | None = None
    instead: Callable[[], Imported] | None = None
    code: Path | None = None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A model that can be imported; ``called`` is its name in the source, ``version`` None if the source has none.

    A pipeline, which is not a model, has its ``lines`` of ``ingot.toml``.

    ``read`` reads it, and raises ``InvalidArgument`` or ``NotFound`` if it is damaged or not supported. Its result
    is valid until the block of :func:`ingot.importing.candidates` ends.
    """

    where: str
    name: str
    version: str | None
    read: Callable[[], Imported]
    _: KW_ONLY
    called: str = ""
    lines: str = ""


def specs(declared: Iterable[Declared], known: Iterable[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return specs of declared inputs.

    Args:
        declared: the inputs.
        known: the inputs in the model's file, if it has any: their names of dynamic dimensions are kept, so that
            inputs can share one. Otherwise each dynamic dimension gets its own name.
    """
    by_name = {spec.name: spec for spec in known}
    return tuple(_spec(item, item.dtype, by_name.get(item.name)) for item in declared if item.dtype is not None)


def _spec(item: Declared, dtype: DType, known: TensorSpec | None) -> TensorSpec:
    first: list[Dim] = []
    if item.batched:
        # A file whose batch has a fixed size, such as 1, has no batch to name.
        fixed = known.shape[0] if known is not None and known.shape else BATCH
        first = [fixed if isinstance(fixed, int) else BATCH]
    if item.control and known is not None:
        return TensorSpec(item.name, dtype, (*first, *known.shape[len(first) :]))
    rank = len(first) + len(item.sizes)
    names: Sequence[Dim | None] = known.shape if known is not None and len(known.shape) == rank else [None] * rank
    rest = (_dim(item.name, axis, size, names[axis]) for axis, size in enumerate(item.sizes, len(first)))
    return TensorSpec(item.name, dtype, (*first, *rest))


def _dim(tensor: str, axis: int, size: int | None, known: Dim | None) -> Dim:
    if size is not None:
        return size
    return known if known is not None else f"{re.sub(r'[^A-Za-z0-9_]', '_', tensor)}_{axis}"
