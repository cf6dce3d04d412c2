"""An engine that can be replaced by another while it serves."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from ingot.runtime.engine import Engine
from ingot.tensors import Array, Signature


class Replaceable:
    """An engine that hands everything to another, which can be replaced by one that answers the same.

    Args:
        engine: the first; whoever closes this closes that.
    """

    def __init__(self, engine: Engine):
        self.current = engine
        self.signature: Signature = engine.signature
        self.platform = engine.platform
        self.device = engine.device
        self._lock = Lock()  # held during a call, so that no engine is closed under one
        self._closed = False

    @property
    def settings(self) -> Mapping[str, str]:
        return self.current.settings

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with self._lock:
            return self.current.run(inputs)

    def replace(self, engine: Engine) -> None:
        """Take another engine after the call in hand, and close the old one; after :meth:`close`, close the new one."""
        with self._lock:
            if self._closed:
                old = engine
            else:
                old, self.current = self.current, engine
        old.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.current.close()
