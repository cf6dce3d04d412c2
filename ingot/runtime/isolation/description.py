"""What a server needs to know about the engine in an engine process."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from pydantic import BaseModel, ConfigDict

from ingot.runtime.engine import Engine
from ingot.tensors import Signature

# Optional attributes of engines that loading and padding look for.
_TRAITS = ("loaded", "compiles", "compiles_shapes", "packed", "captured")


class Description(BaseModel):
    """The members of an engine, and the measures that confine its process.

    ``traits`` are the engine's optional attributes, ``lanes`` is how many calls it runs at a time, and ``log`` has the
    level, logger and text of each record logged while it was opened.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    signature: Signature
    platform: str
    device: str
    settings: Mapping[str, str]
    traits: Mapping[str, float | bool | tuple[int, ...]]
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
            "traits": {name: getattr(engine, name) for name in _TRAITS if getattr(engine, name, None) is not None},
            "measures": measures,
            "log": log,
            "lanes": lanes,
        }
    )
