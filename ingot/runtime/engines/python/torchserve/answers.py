"""From what a handler returns to the bodies and heads of answers, as TorchServe's workers write them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from ingot.errors import HandlerFailed
from ingot.runtime.engines.python.torchserve.ts.context import Context, Reply

log = logging.getLogger("torchserve")


def checked(results: Any, count: int) -> list[Any]:
    """Return a handler's results.

    Raises:
        HandlerFailed: they are not a list, or of another length than the batch.
    """
    if not isinstance(results, list):
        log.error("the handler returned a %s, not a list", type(results).__name__)
        raise HandlerFailed("Invalid model predict output")
    if len(results) != count:
        log.error("the handler returned %d results for %d requests", len(results), count)
        raise HandlerFailed("number of batch response mismatched")
    return results


def bodies(results: Sequence[Any]) -> list[bytes]:
    """Return results as bodies: bytes and texts as they are, tensors by ``torch.save``, the rest as JSON.

    Raises:
        HandlerFailed: one cannot be written.
    """
    return [*map(_body, results)]


def _body(result: Any) -> bytes:
    if isinstance(result, bytes | bytearray):
        return bytes(result)
    if isinstance(result, str):
        return result.encode("utf-8", "surrogatepass")
    torch = sys.modules.get("torch")  # a tensor exists only if the handler has imported it
    if torch is not None and isinstance(result, torch.Tensor):
        torch.save(result, stream := io.BytesIO())
        return stream.getvalue()
    try:
        return json.dumps(result, indent=2).encode()
    except (TypeError, ValueError, RecursionError) as error:
        log.error("the handler returned a %s that JSON cannot hold: %s", type(result).__name__, error)
        raise HandlerFailed("Unsupported model output data type.") from error


def heads(context: Context, count: int) -> list[bytes]:
    """Return the statuses and headers that a handler has set for the requests of its batch."""
    return [_head(context.replies[index]) if index in context.replies else b"" for index in range(count)]


def _head(reply: Reply) -> bytes:
    return orjson.dumps({"status": reply.status, "headers": reply.headers})
