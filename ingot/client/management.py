"""A client of the management listener of a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ingot.client.access import MALFORMED, Access, unreachable
from ingot.errors import CLASSES, InternalError, Unavailable, Unreached

if TYPE_CHECKING:
    import httpx


class Management:
    """The management listener of one server.

    Args:
        place: a path of a Unix socket, or ``http(s)://HOST:PORT``.
        key: an API key with the scope ``manage``.
        ca_file: PEM file of the authorities that may have signed the server's certificate.

    Raises:
        InvalidArgument: the file cannot be used.
    """

    def __init__(self, place: str, key: str | None = None, ca_file: Path | None = None):
        self.place = place
        self._options = options_of(place, Access(key, ca_file, None, None))

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send a request, and return the parsed answer.

        Args:
            method: of HTTP.
            path: of the resource.
            body: sent as JSON.
            timeout: seconds; by default any, as models are loaded meanwhile.

        Raises:
            IngotError: the server's, or it cannot be reached.
        """
        import httpx

        from ingot.client.bodies import aread

        socket = socket_of(self.place)
        transport = None if socket is None else httpx.AsyncHTTPTransport(uds=socket)
        try:
            # httpx limits each part of an answer, and this all of it.
            async with (
                asyncio.timeout(timeout),
                httpx.AsyncClient(transport=transport, timeout=timeout, **self._options) as client,
                client.stream(method, path, json=body) as head,
            ):
                answer = await aread(head, self.place)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise unreached(self.place, error) from error
        return content_of(answer)


def socket_of(place: str) -> str | None:
    """Return the Unix socket that a place names by its path; None for a URL."""
    return None if "://" in place else place.removeprefix("unix:")


def options_of(place: str, access: Access) -> dict[str, Any]:
    """Return the options of httpx's clients, blocking or not, for a path of a Unix socket or ``http(s)://HOST:PORT``.

    Raises:
        InvalidArgument: a file of ``access`` cannot be used.
    """
    from ingot.client.bodies import IDENTITY

    with access.reading():
        verify = access.context()
    url = place if socket_of(place) is None else "http://localhost"
    headers = {**IDENTITY, **access.headers}
    return {"base_url": url, "verify": verify, "headers": headers, "trust_env": False}


def unreached(place: str, error: Exception) -> Unreached:
    """Return the error for a connection to a place that failed, with a remedy."""
    why = str(error) or type(error).__name__
    if socket_of(place) is None:
        return unreachable(place, why)
    return Unreached(f"no server answers at {place}: {why}; is it running?")


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Report an answer of another form than the management listener's as that of another server.

    Raises:
        Unavailable: the block could not read it.
    """
    try:
        yield
    except MALFORMED as error:
        raise Unavailable(f"the answer of {place} has another form; is this the management listener?") from error


def content_of(answer: httpx.Response) -> Any:
    """Return the parsed answer to a request.

    Raises:
        IngotError: the server's.
        Unavailable: it is not that of an Ingot server.
    """
    from ingot.protocol.json_codec import STATUS

    if answer.status_code == 200:
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise Unavailable("the answer is not JSON; is this the management listener?") from error
    try:
        text = str(answer.json()["error"])
    except MALFORMED:
        text = f"status {answer.status_code}; is this the management listener?"
    kinds = {STATUS[code]: kind for code, kind in CLASSES.items()}
    raise kinds.get(answer.status_code, InternalError)(text)


def model_path(name: str, action: str) -> str:
    """Return the path of an action on a model: ``load``, ``unload`` or ``canary``."""
    return f"/v2/repository/models/{quote(name, safe=':')}/{action}"
