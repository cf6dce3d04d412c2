"""What a server needs to know about the engine in an engine process."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import orjson
from pydantic import BaseModel, ConfigDict

from ingot.model_store.format import goldens
from ingot.model_store.format.goldens import Golden
from ingot.runtime.engines.engine import Capabilities, Engine
from ingot.tensors import Array, Signature


class Description(BaseModel):
    """The members of an engine, and the measures that confine its process.

    ``lanes`` is how many calls it runs at a time, and ``log`` has the level, logger and text of each record logged
    while it was opened. ``example`` are the engine's own inputs, as those of a golden case in base64.
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
    example: bytes = b""

    @property
    def inputs(self) -> Mapping[str, Array]:
        """The example's inputs.

        Raises:
            InvalidArchive: they are damaged.
        """
        return goldens.decode(base64.b64decode(self.example))[0].inputs if self.example else {}


def dumps(engine: Engine, measures: list[str], log: list[tuple[int, str, str]], lanes: int) -> bytes:
    """Return the description of an engine as JSON."""
    example = engine.example
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
            "example": base64.b64encode(goldens.encode([Golden(dict(example), {})])).decode() if example else "",
        }
    )
