"""What a server needs to know about the engine in an engine process."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from pydantic import BaseModel, ConfigDict

from ingot.runtime.engines.engine import Capabilities, Engine
from ingot.tensors import Signature


class Description(BaseModel):
    """The members of an engine, and the measures that confine its process.

    ``lanes`` is how many calls it runs at a time, and ``log`` has the level, logger and text of each record logged
    while it was opened.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    signature: Signature
    platform: str
    device: str
    settings: Mapping[str, str]
    capabilities: Capabilities
    measures: tuple[str, ...]
    log: tuple[tuple[int, str, str], ...] = ()
    lanes: int = 1


def dumps(engine: Engine, measures: list[str], log: list[tuple[int, str, str]], lanes: int) -> bytes:
    """Return the description of an engine as JSON."""
    return orjson.dumps(
        {
            "signature": engine.signature,
            "platform": engine.platform,
            "device": engine.device,
            "settings": dict(engine.settings),
            "capabilities": engine.capabilities,
            "measures": measures,
            "log": log,
            "lanes": lanes,
        }
    )
