"""What an HTTP listener serves: operations, inference, and the form of errors.

The operations and their paths are declared in ``plane/operations.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.protocol.requests import Cancellable
from ingot.server.http.parser import Infers
from ingot.server.plane.operations import Operation, Refusal


@dataclass(frozen=True)
class Api:
    """An API over HTTP.

    Attributes:
        operations: those that FastAPI serves.
        refusal: returns the form of errors of a path; None for that of the Open Inference Protocol.
        infers: recognizes the requests of inference, which FastAPI does not see.
        begin: begins one of these; see :func:`ingot.server.http.exchange.begin`.
        infer_refusal: the form of their errors.
        hint: what the error of an unknown path adds.
    """

    operations: tuple[Operation, ...]
    refusal: Callable[[str], Refusal | None]
    infers: Infers
    begin: Callable[..., Cancellable | None]
    infer_refusal: Refusal | None = None
    hint: str = "inference is POST /v2/models/{model}/infer, and GET /openapi.json lists all paths"
