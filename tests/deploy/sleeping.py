"""Replicas of Ray Serve whose engines take a fixed time per batch and no processor, so that few cores run many."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from ingot.deploy.ray.replica import Ingress
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.loading import load_spec
from ingot.tensors import Array

SECONDS = 0.2
"""The duration of an engine call, whatever its batch."""


class SleepingReplica(Ingress):
    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        patch.object(load_spec, "load_engine", _load_sleeping).start()
        await super().reconfigure(user_config)


def _load_sleeping(spec: EngineSpec, isolation: Isolation | None) -> Engine:
    return _Sleeping(load_engine(spec, isolation))


class _Sleeping:
    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        time.sleep(SECONDS)
        return self._engine.run(inputs)
