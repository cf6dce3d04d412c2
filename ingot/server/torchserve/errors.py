"""Errors and other JSON bodies in TorchServe's form."""

from __future__ import annotations

import json
from typing import Any

from ingot.errors import Code, HandlerFailed, IngotError, public_text
from ingot.protocol.json_codec import STATUS

NO_MODEL, NO_VERSION, NO_WORKER = "Model not found: ", "Model version: ", "has no worker to serve inference request"
KEEPS_DEFAULT, RELATIVE = "Cannot remove default version", "Relative path"
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
_BY_START = {
    NO_MODEL: "ModelNotFoundException",
    NO_VERSION: "ModelVersionNotFoundException",
    RELATIVE: "ModelNotFoundException",
    "the store has no ": "ModelNotFoundException",
    KEEPS_DEFAULT: "InvalidModelVersionException",
}


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    text, code = public_text(error), error.code
    if isinstance(error, HandlerFailed):
        return error.status, {"code": error.status, "type": _TYPES[Code.INTERNAL], "message": text}
    kind = next((kind for start, kind in _BY_START.items() if text.startswith(start)), _TYPES[code])
    status = 405 if code is Code.UNSUPPORTED else STATUS[code]
    return status, {"code": status, "type": kind, "message": text}


def pretty(content: Any) -> bytes:
    """Return JSON as TorchServe's workers write it: Python's, indented by two blanks."""
    return json.dumps(content, indent=2).encode()
