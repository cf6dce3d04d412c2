"""A client of the management listener of a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ingot.errors import CLASSES, InternalError, Unavailable
from ingot.server.clients.access import Access

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
        access = Access(key, ca_file, None, None)
        self._headers = access.headers
        with access.reading():
            self._verify = access.context()

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

        unix = None if "://" in self.place else self.place.removeprefix("unix:")
        try:
            async with httpx.AsyncClient(
                transport=None if unix is None else httpx.AsyncHTTPTransport(uds=unix),
                base_url="http://localhost" if unix is not None else self.place,
                verify=self._verify,
                headers=self._headers,
                timeout=timeout,
                trust_env=False,
            ) as client:
                answer = await client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Unavailable(f"no server answers at {self.place}: {error or type(error).__name__}") from error
        return content_of(answer)


def content_of(answer: httpx.Response) -> Any:
    """Return the parsed answer to a request.

    Raises:
        IngotError: the server's.
    """
    from ingot.server.http.codec import STATUS

    if answer.status_code == 200:
        return answer.json()
    try:
        text = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        text = f"status {answer.status_code}; is this the management listener?"
    kinds = {STATUS[code]: kind for code, kind in CLASSES.items()}
    raise kinds.get(answer.status_code, InternalError)(text)


def model_path(name: str, action: str) -> str:
    """Return the path of an action on a model: ``load``, ``unload`` or ``trial``."""
    return f"/v2/repository/models/{quote(name, safe=':')}/{action}"
