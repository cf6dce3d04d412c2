"""``ts.handler_utils.utils``: answers in parts, which are joined and sent as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.runtime.engines.python.torchserve.ts.context import Context


def send_intermediate_predict_response(
    ret: Sequence[Any] | Mapping[int, Any],
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context | None = None,
) -> None:
    """Add a part to the answers of a batch, before what the handler returns.

    Args:
        ret: the part of each request, by its index.
        req_id_map: the requests by index.
        message: has no effect, as in TorchServe's answers over HTTP.
        code: likewise.
        context: that of the handler.

    Raises:
        ValueError: there is no context, by which the parts are kept.
    """
    if context is None:
        raise ValueError("send_intermediate_predict_response needs the handler's context")
    for index in req_id_map:
        context.parts.setdefault(index, []).append(ret[index])
