"""Errors and other JSON bodies in TorchServe's form."""

from __future__ import annotations

import json
from typing import Any

from ingot.errors import (
    Code,
    DefaultVersionKept,
    HandlerFailed,
    IngotError,
    ModelNotFound,
    VersionNotFound,
    public_text,
)
from ingot.protocol.json_codec import STATUS

_TYPES = {
    Code.INVALID_ARGUMENT: "BadRequestException",
    Code.UNAUTHENTICATED: "InvalidKeyException",
    Code.PERMISSION_DENIED: "InvalidKeyException",
    Code.NOT_FOUND: "ResourceNotFoundException",
    Code.ALREADY_EXISTS: "ConflictStatusException",
    Code.TOO_LARGE: "TooLongFrameException",
    Code.TOO_MANY_REQUESTS: "ServiceUnavailableException",
    Code.INTERNAL: "InternalServerException",
    Code.UNSUPPORTED: "MethodNotAllowedException",
    Code.UNAVAILABLE: "ServiceUnavailableException",
    Code.DEADLINE_EXCEEDED: "RequestTimeoutException",
    Code.STORAGE_FULL: "OutOfMemoryError",
}
# The types of errors that have the same code.
_OF_CLASSES: dict[type[IngotError], str] = {
    ModelNotFound: "ModelNotFoundException",
    VersionNotFound: "ModelVersionNotFoundException",
    DefaultVersionKept: "InvalidModelVersionException",
}


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    text, code = public_text(error), error.code
    if isinstance(error, HandlerFailed):
        return error.status, {"code": error.status, "type": _TYPES[Code.INTERNAL], "message": text}
    kind = _OF_CLASSES.get(type(error), _TYPES[code])
    status = 405 if code is Code.UNSUPPORTED else STATUS[code]
    return status, {"code": status, "type": kind, "message": text}


def pretty(content: Any) -> bytes:
    """Return JSON as TorchServe's workers write it: Python's, indented by two blanks."""
    return json.dumps(content, indent=2).encode()
