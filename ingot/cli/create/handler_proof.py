"""The proof of a handler that became steps: recorded requests, sent to both on one server."""

from __future__ import annotations

import base64
import http.client
import json
import math
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound, ParityError
from ingot.report.text import one_line

if TYPE_CHECKING:
    from ingot.model_store import Archive
    from ingot.model_store.format.evidence import StepsEvidence
    from ingot.runtime.engines.python.torchserve.rows import Part

_TOLERANCE = 1e-4
_JSON, _TEXT, _FILE = "application/json", "text/plain", "application/octet-stream"
_SECONDS = 120.0
_SHOWN = 200


class Recorded(NamedTuple):
    """A recorded request: where it is written, and the parts of its body."""

    where: str
    parts: Sequence[Part]


def recorded(path: Path) -> list[Recorded]:
    """Return recorded requests.

    Args:
        path: what ``ingot serve --record`` wrote of a handler, a folder or one of its files; or a file with a row of a
            handler in each line, as JSON: ``{"data": "a text"}``, with ``{"file": "kitten.jpg"}`` or
            ``{"base64": "..."}`` as a value for bytes.

    Raises:
        NotFound: there is no such file, or a line names a file that does not exist.
        InvalidArgument: a file is not of these forms, or there is no request.
    """
    if not path.exists():
        raise NotFound(f"there is no file or folder {path}")
    lines = not path.is_dir() and path.suffix != ".safetensors"
    found = [*(_lines(path) if lines else _goldens(path))]
    if not found:
        raise InvalidArgument(f"{path} holds no requests; record some with ingot serve --record FOLDER")
    return found


def _lines(path: Path) -> Iterator[Recorded]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"line {number} of {path.name}"
        if line.strip():
            with foreign.reported_as(InvalidArgument, f"{where} is not a row of a handler", keep=NotFound):
                yield Recorded(where, [_part(path.parent, *each) for each in json.loads(line).items()])


def _part(folder: Path, name: str, value: Any) -> Part:
    from ingot.runtime.engines.python.torchserve.rows import Part

    if isinstance(value, str):
        return Part(name, value.encode(), _TEXT)
    if isinstance(value, dict) and [*value] == ["base64"]:
        return Part(name, base64.b64decode(value["base64"], validate=True))
    if isinstance(value, dict) and [*value] == ["file"]:
        if not (file := folder / value["file"]).is_file():
            raise NotFound(f"there is no file {file}")
        return Part(name, file.read_bytes())
    return Part(name, json.dumps(value).encode(), _JSON)


def _goldens(path: Path) -> Iterator[Recorded]:
    from ingot.model_store.format import goldens
    from ingot.runtime.engines.python.torchserve.rows import REQUEST, parts_of

    for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
        for number, case in enumerate(goldens.decode(file.read_bytes()), 1):
            if REQUEST not in case.inputs:
                raise InvalidArgument(f"{file} has requests to another model than a handler of TorchServe")
            for value in case.inputs[REQUEST].tolist():
                yield Recorded(f"request {number} of {file.name}", parts_of(value)[0])


def prove(requests: Sequence[Recorded], permit: str | None, declared: Archive, original: Archive) -> StepsEvidence:
    """Send requests to an archive with steps and to its handler, which a server on this machine runs.

    Raises:
        ParityError: an answer differs, or no request has an answer to compare.
    """
    from ingot.model_store.format.evidence import StepsEvidence
    from ingot.server.main import serve

    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "torchserve_ports": "0,0,0,0,0", "permit": permit}
    errors = []
    with serve(declared, original, allow_code=True, torchserve=True, **ports) as server:
        names = [*server.models]
        place = urllib.parse.urlsplit(server.torchserve_urls["inference"]).netloc
        for request in requests:
            ours, theirs = (_answered(place, name, request.parts) for name in names)
            if theirs is not None:
                errors.append(compared(request.where, ours, theirs))
    if not errors:
        raise ParityError(f"the handler answers none of the {len(requests)} requests, so that nothing can be compared")
    return StepsEvidence(
        reference=f"the handler's own code, on {len(errors)} recorded requests",
        items=0,
        answers=len(errors),
        error=max(errors),
        tolerance=_TOLERANCE,
    )


def compared(where: str, ours: Any, theirs: Any) -> float:
    """Return the difference of two answers, relative to the largest number that the handler answers."""
    difference = _difference(ours, theirs) / (_largest(theirs) or 1)
    if difference > _TOLERANCE:
        shown = [one_line(json.dumps(each))[:_SHOWN] if each is not None else "an error" for each in (theirs, ours)]
        raise ParityError(
            f"{where}: the handler answers {shown[0]}, and the steps answer {shown[1]}; import the handler as it is, "
            "without --without-code"
        )
    return difference


def _difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of numbers in two values of JSON; infinite if anything else differs."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return max((_difference(ours[key], theirs[key]) for key in ours), default=0.0)
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return max(map(_difference, ours, theirs), default=0.0)
    if isinstance(ours, float) and isinstance(theirs, float) and math.isfinite(difference := abs(ours - theirs)):
        return difference
    return 0.0 if ours == theirs and type(ours) is type(theirs) else math.inf  # NaN, too: a comparison would hide it


def _largest(value: Any) -> float:
    if isinstance(value, dict | list):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0.0)
    return abs(value) if isinstance(value, float) and math.isfinite(value) else 0.0


def _answered(place: str, name: str, parts: Sequence[Part]) -> Any:
    """Return the JSON that a model answers, or its body as text; None for an error."""
    body, media_type = _body(parts)
    connection = http.client.HTTPConnection(place, timeout=_SECONDS)
    try:
        connection.request("POST", f"/predictions/{name}", body, {"Content-Type": media_type})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return None
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", "replace")


def _body(parts: Sequence[Part]) -> tuple[bytes, str]:
    """Return a body with these parts, and its type: a form, unless the only part is the whole body."""
    if [part.name for part in parts] == ["body"]:
        return parts[0].raw, parts[0].media_type or _FILE
    boundary = uuid.uuid4().hex
    pieces = []
    for part in parts:
        # TorchServe reads the type of files only.
        typed = f'; filename="{part.name}"\r\nContent-Type: {part.media_type}' if part.media_type else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{part.name}"{typed}\r\n\r\n'
        pieces += [head.encode(), part.raw, b"\r\n"]
    return b"".join((*pieces, f"--{boundary}--\r\n".encode())), f"multipart/form-data; boundary={boundary}"
