"""One inference exchange over HTTP: a request's headers and body in, the answer's out. HTTP fronts call only this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ingot.errors import IngotError, InvalidArgument, public_text
from ingot.server.dataplane import DataPlane
from ingot.server.http import codec, compression


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"


async def infer(
    plane: DataPlane, model: str, version: str, headers: Mapping[str, str], body: bytes, max_body_bytes: int
) -> Answer:
    """Answer an inference request; errors become answers too.

    Args:
        plane: the server's behaviour.
        model: from the path.
        version: from the path, or empty.
        headers: the request's, with names in lower case.
        body: the whole body, as it came.
        max_body_bytes: how large it may become when it is decompressed.
    """
    try:
        body = compression.decompress(body, headers.get("content-encoding", ""), max_body_bytes)
        length = _header_length(headers.get(codec.HEADER_LENGTH.lower()))
        if length == 0:
            request, layout = codec.decode_raw_request(model, version, body, plane.signature(model, version))
        else:
            request, layout = codec.decode_request(model, version, body, length)
        encoded, length = codec.encode_response(await plane.infer(request, "http"), layout)
    except IngotError as error:
        return refusal(plane, error)
    answer: dict[str, str] = {}
    if length is not None:
        answer[codec.HEADER_LENGTH] = str(length)
    if (encoding := compression.wanted_encoding(headers.get("accept-encoding", ""))) is not None:
        encoded = compression.compress(encoded, encoding)
        answer["Content-Encoding"] = encoding
    return Answer(200, encoded, answer, "application/json" if length is None else "application/octet-stream")


def refusal(plane: DataPlane, error: IngotError) -> Answer:
    """Return an error as an answer, and count it."""
    plane.count_error("http", error)
    return Answer(codec.STATUS[error.code], codec.dumps({"error": public_text(error)}))


def _header_length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise InvalidArgument(f"{codec.HEADER_LENGTH} is '{text}'; it must be the length of the JSON header in bytes")
    return int(text)
