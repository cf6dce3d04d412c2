"""Connections of commands to a running server, and the options that name and authenticate it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.client.management import content_of, options_of, socket_of, unreached
from ingot.errors import InvalidArgument, NotFound, Unauthenticated

if TYPE_CHECKING:
    import httpx

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="File of the API key, if the server needs one.",
        show_default="the variable INGOT_API_KEY",
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option("--ca-file", help="PEM file of the authorities that may have signed the server's certificate."),
]
CertOption = Annotated[
    Path | None,
    typer.Option("--cert-file", help="PEM file of the client's certificate, if the server asks for one."),
]
CertKeyOption = Annotated[Path | None, typer.Option("--cert-key-file", help="PEM file of that certificate's key.")]


@dataclass(frozen=True, kw_only=True)
class ClientAccess:
    """The certificates and the key of a client of inference."""

    ca_file: CaOption = None
    key_file: KeyOption = None
    cert_file: CertOption = None
    cert_key_file: CertKeyOption = None


class Server:
    """A running server, over HTTP on a port or a Unix socket.

    Args:
        place: a path of a Unix socket, ``http(s)://HOST:PORT``, or ``HOST:PORT`` for HTTP.
        key_file: file of the API key; None for the variable ``INGOT_API_KEY``.
        ca_file: the authorities that may have signed the server's certificate; None for the public ones.
        cert_file, cert_key_file: the client's certificate, if the server asks for one.
        timeout: seconds for a response; None for no limit.

    Raises:
        InvalidArgument: the place has another form, a file cannot be used, or only one of the two of the certificate
        is given.
    """

    def __init__(
        self,
        place: str,
        key_file: Path | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        cert_key_file: Path | None = None,
        timeout: float | None = None,
    ):
        import httpx

        from ingot.client.access import Access

        self.place = place = _written_out(place)
        self._timeout = timeout
        access = Access(api_key(key_file), ca_file, cert_file, cert_key_file)
        socket = socket_of(place)
        transport = None if socket is None else httpx.HTTPTransport(uds=socket)
        self._client = httpx.Client(transport=transport, timeout=timeout, **options_of(place, access))

    def get(self, path: str) -> httpx.Response:
        """Send a request, and keep the connection.

        Raises:
            Unreached: no server answers.
        """
        return self._request("GET", path)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send the one request of a command, and return the parsed answer.

        Raises:
            IngotError: the server's, or it cannot be reached.
        """
        with self._client:
            answer = self._request(method, path, body)
        with naming_key_options():
            return content_of(answer)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        import httpx

        from ingot.client.bodies import read

        try:
            with self._client.stream(method, path, json=body) as head:
                return read(head, self.place, seconds=self._timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreached(self.place, error) from error


def _written_out(place: str) -> str:
    """Return the place of a server as a URL, if it is written ``HOST:PORT``.

    Raises:
        InvalidArgument: it is only a port, or that of gRPC.
    """
    if place.isdecimal():
        raise InvalidArgument(f"'{place}' is not a URL or a path; write http://127.0.0.1:{place}")
    if place.startswith(("grpc://", "grpcs://")):
        raise InvalidArgument(f"'{place}' is a gRPC port; give the HTTP port, as http://HOST:8000")
    return f"http://{place}" if re.fullmatch(r"[^/]+:[0-9]+", place) else place


def only_server(form: str) -> str:
    """Return the management socket of the one server of this user on this machine.

    Args:
        form: how a user names a server, such as ``--server PLACE``.

    Raises:
        NotFound: no server runs.
        InvalidArgument: several do.
    """
    from ingot.server.management import places

    found = places.running()
    if not found:
        raise NotFound(f"no server of this user runs with a management socket on this machine; name one: {form}")
    if len(found) > 1:
        listed = "".join(f"\n  {form.replace('PLACE', str(path))}" for path in found)
        raise InvalidArgument(f"several servers run; choose one by its process and HTTP port:{listed}")
    return str(found[0])


@contextmanager
def naming_key_options() -> Iterator[None]:
    """Add to a server's refusal of a key how a command takes one: the server's text is for all clients."""
    try:
        yield
    except Unauthenticated as error:
        raise Unauthenticated(f"{error}; commands take it from --key-file or INGOT_API_KEY") from error


def api_key(file: Path | None) -> str | None:
    """Return the API key from a file or the variable, or None if there is neither."""
    if file is None:
        return os.environ.get("INGOT_API_KEY") or None
    from ingot.model_store.trust.keys import read_file

    return read_file(file.expanduser()).decode(errors="replace")
