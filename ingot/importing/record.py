"""What a reader found: models that can be imported, and one of them read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from ingot.errors import InvalidArgument
from ingot.importing.declared import Declared

ModelFormat = Literal["onnx", "torchscript", "pt2", "state_dict"]
"""What a serialized model is: a graph, a TorchScript file, an exported program, or weights for a class in Python."""


@dataclass(frozen=True)
class Consent:
    """What the user agreed to.

    Args:
        allow_code: the model's own code may be run.
        without_handler: a handler of the author's may be left behind.
    """

    allow_code: bool = False
    without_handler: bool = False

    def need_code(self, why: str) -> None:
        """Raise InvalidArgument unless code may be run; ``why`` says which."""
        if not self.allow_code:
            raise InvalidArgument(
                f"{why}; if you trust where it comes from, allow that by --allow-code (INGOT_ALLOW_CODE=1, or "
                "allow_code=True)"
            )


@dataclass(frozen=True)
class Imported:
    """One model, read.

    Args:
        called: what messages call the serialized model, such as ``'model.pt' in densenet.mar``.
        format: what it is.
        file: where it lies, under whatever name.
        inputs: as the source declares them; empty if it does not.
        outputs: their names, in order; empty if the source does not tell.
        code: the Python file that defines the class, for ``state_dict``.
        documents: small files that came with it, by name.
        notes: what is not taken over.
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
    """A model that can be imported; ``version`` is None where the source tells none, ``called`` is its name there.

    ``read`` reads it, and raises ``InvalidArgument`` or ``NotFound`` where it is damaged or cannot be taken over. What
    it gives lasts as long as :func:`ingot.importing.candidates` does.
    """

    where: str
    name: str
    version: str | None
    read: Callable[[], Imported]
    _: KW_ONLY
    called: str = ""
