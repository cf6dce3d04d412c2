"""When requests were queued and computed, written to files for a sample of them: Triton's extension trace."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument, PermissionDenied
from ingot.runtime.metrics import Metrics

log = logging.getLogger(__name__)

# Traces that wait to be written, at most; and the bytes of all files, as clients decide how much is traced.
_MOST_TRACES = 10_000
_MOST_BYTES = 256 << 20
_FOREVER = -1

Times = Mapping[str, float]
"""Seconds of a monotonic clock, by the name of the timestamp."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The settings of traces, of all models or of one.

    Attributes:
        trace_level: whether timestamps are written.
        trace_rate: one of this many requests is traced.
        trace_count: how many more are traced; -1 for no limit.
        log_frequency: traces per file; 0 for one file, when tracing is turned off or ends.
    """

    trace_level: bool = False
    trace_rate: int = 1000
    trace_count: int = _FOREVER
    log_frequency: int = 0

    def changed(self, wanted: Mapping[str, Any], default: TraceSettings) -> TraceSettings:
        """Return it with some settings changed; None stands for those of ``default``.

        Raises:
            InvalidArgument: a setting is unknown, fixed, or has a wrong value.
        """
        known = {field.name for field in fields(self)}
        found: dict[str, Any] = {}
        for name, value in wanted.items():
            if name in ("trace_file", "trace_mode"):
                raise InvalidArgument(f"clients cannot change '{name}'")  # they could write any file
            if name not in known:
                text = ", ".join(sorted(known))
                raise InvalidArgument(f"there is no trace setting '{name[:100]}' that can be changed; known: {text}")
            found[name] = getattr(default, name) if value is None else _read(name, value)
        return replace(self, **found)


class Traces:
    """The traces of a server, and what clients decide about them.

    Args:
        path: where they are written, with a number behind it; None if clients cannot turn tracing on.
        metrics: where traces are counted.
    """

    def __init__(self, path: Path | None, metrics: Metrics):
        self.path = path
        self.changed: Callable[[bool], None] = lambda active: None
        self._counted = metrics.traces
        self._all = TraceSettings()
        self._of_model: dict[str, TraceSettings] = {}
        self._seen: dict[str, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self._number = self._written = self._files = 0
        # One thread, so that files are written in the order of their traces.
        self._writer: ThreadPoolExecutor | None = None

    def content(self, model: str = "") -> dict[str, Any]:
        """Return the settings of a model, or of all, as Triton names them."""
        settings = self._settings(model)
        return {
            "trace_level": ["TIMESTAMPS" if settings.trace_level else "OFF"],
            **{name: str(getattr(settings, name)) for name in ("trace_rate", "trace_count", "log_frequency")},
            "trace_file": "" if self.path is None else str(self.path),
            "trace_mode": "triton",
        }

    def change(self, wanted: Mapping[str, Any], model: str = "") -> None:
        """Change some settings of a model, or of all that have none; None removes a model's.

        Raises:
            PermissionDenied: clients cannot turn tracing on.
            InvalidArgument: a setting is unknown, or has a wrong value.
        """
        if not wanted:
            return
        if self.path is None:
            raise PermissionDenied("clients may not trace requests on this server; --trace FILE allows it")
        settings = self._settings(model).changed(wanted, self._all if model else TraceSettings())
        if model:
            self._of_model[model] = settings
        else:
            self._all = settings
        self._seen.pop(model, None)
        active = any(each.trace_level for each in (self._all, *self._of_model.values()))
        self.changed(active)
        if not active:
            self._flush()

    def samples(self, model: str) -> bool:
        """Return whether a request of a model is traced, and count it."""
        key = model if model in self._of_model else ""
        settings = self._settings(model)
        if not settings.trace_level or settings.trace_count == 0:
            return False
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen % settings.trace_rate:
            return False
        if settings.trace_count != _FOREVER:
            left = replace(settings, trace_count=settings.trace_count - 1)
            self._all, self._of_model = (self._all, {**self._of_model, key: left}) if key else (left, self._of_model)
        return True

    def add(self, model: str, version: str, identifier: str, times: Times) -> None:
        """Add the trace of a request; files are written in a thread."""
        self._number += 1
        self._counted.inc()
        self._waiting += (
            {"id": self._number, "model_name": model, "model_version": version, "request_id": identifier[:200]},
            {
                "id": self._number,
                "timestamps": [{"name": name, "ns": int(seconds * 1e9)} for name, seconds in times.items()],
            },
        )
        settings = self._settings(model)
        most = min(settings.log_frequency or _MOST_TRACES, _MOST_TRACES)
        if len(self._waiting) >= 2 * most or settings.trace_count == 0:
            self._flush()

    def close(self) -> None:
        """Write the traces that wait, and return when all are written."""
        self._flush()
        if self._writer is not None:
            self._writer.shutdown()

    def _settings(self, model: str) -> TraceSettings:
        return self._of_model.get(model, self._all)

    def _flush(self) -> None:
        """Let the traces that wait be written in a thread."""
        waiting, self._waiting = self._waiting, []
        if waiting and self.path is not None:
            self._writer = self._writer or ThreadPoolExecutor(1, "ingot-traces")
            self._writer.submit(self._write, self.path, waiting)

    def _write(self, path: Path, waiting: list[dict[str, Any]]) -> None:
        content = json.dumps(waiting, separators=(",", ":")).encode()
        self._written += len(content)
        if self._written > _MOST_BYTES:
            log.warning("traces are dropped: the files have %d MiB", _MOST_BYTES >> 20)
            return
        try:
            with os.fdopen(self._create(path), "wb") as file:
                file.write(content)
        except OSError as error:
            log.error("traces cannot be written to %s: %s", path, error.strerror)

    def _create(self, path: Path) -> int:
        """Create the next file that does not exist, for its owner only, and return its descriptor."""
        while True:
            number, self._files = self._files, self._files + 1
            with contextlib.suppress(FileExistsError):
                return os.open(f"{path}.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _read(name: str, value: Any) -> Any:
    """Return the value of a setting, which clients send as text or as a list of texts."""
    values = value if isinstance(value, list) else [value]
    if name == "trace_level":
        if not values or not all(isinstance(each, str) for each in values) or not {*values} <= {"OFF", "TIMESTAMPS"}:
            raise InvalidArgument("'trace_level' must be OFF or TIMESTAMPS; tensors are not traced (see --record)")
        return "TIMESTAMPS" in values
    least = {"trace_rate": 1, "trace_count": _FOREVER, "log_frequency": 0}[name]
    with contextlib.suppress(ValueError, TypeError):
        number = int(values[0]) if len(values) == 1 and isinstance(values[0], str | int) else least - 1
        if least <= number < 1 << 31:
            return number
    raise InvalidArgument(f"'{name}' must be a whole number, at least {least}")
