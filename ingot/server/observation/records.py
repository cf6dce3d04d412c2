"""How log records are written: as lines for people, or as JSON; both name the request that a record is about."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import orjson

from ingot.server.observation.context import CONTEXT

Format = Literal["human", "json"]


class _Request(logging.Filter):
    """Adds the request that the current code serves."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = CONTEXT.get()
        identity = {}
        if context is not None:
            identity["request_id"] = context.id.decode()
            if context.traceparent:
                identity["trace_id"] = context.traceparent[3:35].decode()
        record.identity = identity
        return True


class HumanFormatter(logging.Formatter):
    """One line per record, with its fields as ``name=value`` behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        shown = {name: value for name, value in _fields(record).items() if name not in ("method", "path", "status")}
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in shown.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object per record: ``time``, ``level``, ``logger``, ``message``, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(content, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {**getattr(record, "fields", {}), **getattr(record, "identity", {})}


def configure(level: int | str, form: Format = "human") -> None:
    """Send log records of this level and above to stderr; for the processes of ``ingot serve``."""
    handler = logging.StreamHandler()
    handler.addFilter(_Request())
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    logging.basicConfig(level=level, handlers=[handler])
