"""What an engine process is asked to do when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from ingot.runtime.engines.spec import EngineSpec


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """An engine in a separate process, and the limits of that process.

    Args:
        engine: the file, and how it is opened.
        gpu: whether GPUs are used; their libraries need local sockets.
        lanes: calls that may run at a time.
        memory_mb: most private memory of the process in MiB; None is unlimited.
        call_mb: most MiB that a call may add to what the process holds once it is ready, if ``memory_mb`` is None.
    """

    engine: EngineSpec
    gpu: bool
    lanes: int
    memory_mb: int | None
    call_mb: int | None

    @property
    def unpacks(self) -> bool:
        """Whether loading the model may write temporary files."""
        return self.engine.format not in ("onnx", "step")

    @property
    def code(self) -> bool:
        """Whether it is code in Python: it starts no programs while it loads either, and its output is logged."""
        return self.engine.format == "python"

    def permits(self, *permissions: str) -> bool:
        """Return whether the process has one of some :mod:`~ingot.permissions`."""
        return any(permission in self.engine.permissions for permission in permissions)

    @property
    def reads(self) -> bool:
        """Whether the process may open files once it has loaded the model."""
        return self.engine.format != "step"

    @property
    def cache(self) -> Path | None:
        """The folder in which TensorRT keeps what it compiled; None for other engines."""
        return self.engine.cache if self.engine.engine == "tensorrt" else None

    @property
    def memory(self) -> int | None:
        """Most private memory of the process in bytes; None is unlimited."""
        return None if self.memory_mb is None else self.memory_mb << 20

    def dumps(self) -> bytes:
        """Return its JSON form."""
        return orjson.dumps(self, default=str)

    @classmethod
    def loads(cls, content: bytes | memoryview) -> ProcessSpec:
        """Return the spec of a JSON form; it comes from the server, so its content is not checked."""
        parts = orjson.loads(content)
        return cls(**{**parts, "engine": EngineSpec.of_json(parts["engine"])})
