"""ONNX Runtime's engine in a pipeline on a fake device, whose memory is the host's, so that a CPU session computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.engines.ort.ort_lane import ASYNCHRONOUS, GRAPH
from ingot.runtime.gpu.graphs import GraphOptions, graphs_of
from ingot.runtime.gpu.pipeline import Pipeline
from tests.runtime.gpu.fake_device import FakeDevice, Span


class SessionDevice(FakeDevice):
    """A device whose session allocates outputs itself; ``failing``, if set, is raised by its next runs."""

    failing: Exception | None = None

    def _check_device(self, span: Span) -> None:
        """Allow addresses of the session's memory."""


class Binding:
    """A binding that remembers the addresses and shapes of the next run."""

    def __init__(self, binding: Any):
        self._binding = binding
        self.bound: dict[str, tuple[int, tuple[int, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._binding, name)

    def bind_input(self, name: str, *how: Any) -> None:
        self.bound[name] = how[4], tuple(how[3])
        self._binding.bind_input(name, *how)

    def bind_output(self, name: str, *how: Any) -> None:
        if len(how) > 2:
            self.bound[name] = how[4], tuple(how[3])
        self._binding.bind_output(name, *how)


class Session:
    """A session that computes what is ordered before in the stream, and then runs on the CPU.

    ``kept`` is how many runs since the last one that waited for its kernels: each keeps memory until then.
    """

    def __init__(self, session: Any, device: SessionDevice, stream: int):
        self._session, self._device, self._stream = session, device, stream
        self.kept = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> Binding:
        return Binding(self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        self._device.run_stream(self._stream)
        if self._device.failing is not None:
            raise self._device.failing
        self.kept = self.kept + 1 if asynchronous(options) else 0
        self._session.run_with_iobinding(binding._binding, options)


def asynchronous(options: Any) -> bool:
    """Return whether a run with these options may return before its kernels have run."""
    try:
        return bool(options.get_run_config_entry(ASYNCHRONOUS[0]) == ASYNCHRONOUS[1])
    except RuntimeError:  # there is no such entry
        return False


class CapturingSession(Session):
    """A session that was opened for CUDA graphs: a run of a known graph must have the addresses that it has recorded.

    Attributes:
        runs: numbers of the graphs, in the order of the runs; -1 for runs without one.
        refusing: whether captures fail.
    """

    def __init__(self, session: Any, device: SessionDevice, stream: int):
        super().__init__(session, device, stream)
        self.runs: list[int] = []
        self.refusing = False
        self._captured: dict[int, dict[str, tuple[int, tuple[int, ...]]]] = {}

    def run(self, names: Any, feed: Any, options: Any = None) -> Any:
        assert options is not None, "this run would be captured"
        assert options.get_run_config_entry(GRAPH) == "-1"
        return self._session.run(names, feed)

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        number = int(options.get_run_config_entry(GRAPH))
        self.runs.append(number)
        if number >= 0:
            if self.refusing:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
            recorded = self._captured.setdefault(number, dict(binding.bound))
            assert binding.bound == recorded, "the graph would use other memory"
            assert set(recorded) == {spec.name for spec in (*self.get_inputs(), *self.get_outputs())}
        binding.bound.clear()
        super().run_with_iobinding(binding, options)


def pipelined(path: Path, device: SessionDevice, graphs: GraphOptions | None = None) -> OrtEngine:
    """Return an engine that runs in a pipeline, and captures batches if ``graphs`` are given."""
    engine: Any = OrtEngine(path, device="cpu", threads=1)
    engine.device = "cpu:0"  # ONNX Runtime's name of the memory
    engine._pipeline = pipeline = Pipeline(device)
    engine._graphs = graphs_of(engine.signature, graphs and {**graphs, "padded": False})
    opened = Session if graphs is None else CapturingSession
    engine._session = opened(engine._session, device, pipeline.compute)
    engine._enter(pipeline)
    assert isinstance(engine, OrtEngine)
    return engine
