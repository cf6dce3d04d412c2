"""The readings of a running server over some seconds."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ingot.cli.connection import Server
from ingot.errors import InternalError, InvalidArgument, PermissionDenied, Unavailable, Unreached

if TYPE_CHECKING:
    from ingot.client.monitoring import Reading, ServerLoad

WINDOW = 10.0
"""Seconds over which latencies and shares are computed, as on the server's page."""
# What numbers, labels and fields that Ingot does not send lead to.
_WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Monitor:
    """Reads a server, and keeps the readings of the window.

    Args:
        connect: returns a connection; called again after the server was gone, since its socket may be another.
    """

    def __init__(self, connect: Callable[[], Server]):
        self._connect = connect
        self._server: Server | None = None
        self._readings: deque[Reading] = deque()
        self.place = self.version = ""

    @property
    def title(self) -> str:
        """The server's address and version."""
        return f"{self.place}  Ingot {self.version}"

    def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def poll(self) -> ServerLoad:
        """Read the server, and return its load since the last reading.

        Raises:
            Unreached: no server answers.
            IngotError: what answers is not an Ingot server, or refuses access.
        """
        from ingot.client.monitoring import load

        try:
            now = self._read()
        except Unreached:
            self._readings.clear()  # another process may answer next, whose counts begin at 0
            self.close()
            raise
        started = "ingot_start_time_seconds"
        if self._readings and self._readings[-1].samples.total(started) != now.samples.total(started):
            self._readings.clear()
        before = self._readings[-1] if self._readings else now
        self._readings.append(now)
        while len(self._readings) > 2 and now.at - self._readings[1].at >= WINDOW:
            self._readings.popleft()
        try:
            return load(now, before, self._readings[0])
        except _WRONG as error:
            raise self._foreign("its metrics and statistics do not fit together") from error

    def _read(self) -> Reading:
        from ingot.client.monitoring import Reading, Samples

        if self._server is None:
            self._server = self._connect()
            self.place = self._server.place
        server = self._server
        if not self._readings:
            self._identify(server)
        try:
            at, samples = time.monotonic(), Samples(self._text(server, "/metrics"))
            if "ingot_threads" not in samples:
                raise self._foreign("its /metrics has none of Ingot's metrics")
            models = json.loads(self._text(server, "/v2/models/stats"))["model_stats"]
        except _WRONG as error:
            raise self._foreign("its /metrics or /v2/models/stats is not what Ingot sends") from error
        return Reading(at=at, samples=samples, models=models)

    def _identify(self, server: Server) -> None:
        try:
            self.version = str(json.loads(self._text(server, "/v2"))["version"])
        except _WRONG as error:
            raise self._foreign("it does not describe itself at /v2") from error

    def _text(self, server: Server, path: str) -> str:
        response = server.get(path)
        place, status = server.place, response.status_code
        if status in (401, 403):
            raise PermissionDenied(
                f"the server at {place} refuses {path}; give a key with the rights infer and metrics, or manage on a "
                "management port, by --key-file or INGOT_API_KEY"
            )
        if status == 503:
            raise Unavailable(
                f"the server at {place} is overloaded or stopping: {path} has status 503; ask again later"
            )
        if status >= 500:
            raise InternalError(f"the server at {place} failed: {path} has status {status}; see its log")
        if status != 200:
            raise self._foreign(f"{path} has status {status}")
        return response.text

    def _foreign(self, why: str) -> InvalidArgument:
        return InvalidArgument(
            f"what answers at {self.place} is not the HTTP port of an Ingot server: {why}; give the URL that "
            "ingot serve prints after HTTP"
        )
