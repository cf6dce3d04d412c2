"""ONNX Runtime's engine in a pipeline on a fake device, whose memory is the host's, so that a CPU session computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.runtime.engines.ort import OrtEngine
from ingot.runtime.gpu.pipeline import Pipeline
from tests.runtime.gpu.fake_device import FakeDevice, Span


class SessionDevice(FakeDevice):
    """A device whose session allocates outputs itself; ``failing``, if set, is raised by its next runs."""

    failing: Exception | None = None

    def _check_device(self, span: Span) -> None:
        """Allow addresses of the session's memory."""


class Session:
    """A session that computes what is ordered before in the stream, and then runs on the CPU."""

    def __init__(self, session: Any, device: SessionDevice, stream: int):
        self._session, self._device, self._stream = session, device, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self._device.run_stream(self._stream)
        if self._device.failing is not None:
            raise self._device.failing
        self._session.run_with_iobinding(binding, options)


def pipelined(path: Path, device: SessionDevice) -> OrtEngine:
    """Return an engine that runs in a pipeline."""
    engine: Any = OrtEngine(path, device="cpu", threads=1)
    engine.device = "cpu:0"  # ONNX Runtime's name of the memory
    engine._pipeline = pipeline = Pipeline(device)
    engine._lane = engine._new_lane(pipeline)
    engine._session = engine._lane._session = Session(engine._session, device, pipeline.compute)
    engine._run_options = engine._new_options()
    assert isinstance(engine, OrtEngine)
    return engine
