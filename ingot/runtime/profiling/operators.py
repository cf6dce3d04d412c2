"""Where a model's time goes: the time of its operators, by the profilers of ONNX Runtime and PyTorch."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store import Variant
from ingot.runtime.engines.loader import engine_of, load_engine
from ingot.runtime.engines.ort import ort_session
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.profiling.profile import repeat, zeros
from ingot.tensors import Array

# Calls before those that count: kernels choose their algorithms and memory in the first ones.
_WARMUP = 3


@dataclass(frozen=True)
class OperatorTime:
    """One node of the graph that the engine runs, which may stand for several of the model's.

    ``seconds`` is the median time in one engine call, ``calls`` how often it runs in it.
    """

    node: str
    operator: str
    seconds: float
    calls: float = 1


@dataclass(frozen=True)
class Profile:
    """The operators of one batch size; ``seconds`` is the median time of an engine call that is not profiled."""

    rows: int
    seconds: float
    operators: tuple[OperatorTime, ...]

    @property
    def in_operators(self) -> float:
        """The seconds in operators in one call; profiling makes them longer."""
        return sum(each.seconds for each in self.operators)


@dataclass(frozen=True)
class _Run:
    """One batch size to be profiled: its inputs, and how many calls count."""

    rows: int
    inputs: Mapping[str, Array]
    calls: int


class Profiler:
    """Profiles a variant.

    Args:
        variant: of an unpacked archive.
        threads: of the engine.
        calls: that count, per batch size.
        allow_code: whether formats that can run their author's code are loaded.

    Attributes:
        events: of all profiles so far, as Chrome's trace format has them.
    """

    def __init__(self, variant: Variant, *, threads: int, calls: int, allow_code: bool = False):
        variant.check_answers_at_once("ingot profile")
        self._variant = variant
        self._threads = threads
        self._calls = calls
        self._allow_code = allow_code
        goldens = variant.goldens()
        self._example = goldens[0].inputs if goldens else zeros(variant.signature)
        self.events: list[dict[str, Any]] = []

    def profile(self, rows: int) -> Profile:
        """Profile one batch size; a model without a batch is profiled as it is.

        Raises:
            InvalidArgument: the model does not accept a batch of that size, or cannot be run.
            Unsupported: its engine has no profiler.
        """
        signature = self._variant.signature
        if signature.batch is None:
            rows = 1
        elif (most := signature.max_samples(rows)) < rows:
            raise InvalidArgument(f"the model accepts batches of at most {most} rows, not {rows}; change --batch")
        try:
            inputs = self._example if signature.batch is None else repeat(signature, self._example, rows)
        except MemoryError:
            raise InvalidArgument(f"there is too little memory for inputs of {rows} rows; change --batch") from None
        run = _Run(rows, inputs, self._calls)
        form, name = self._variant.serving.format, engine_of(self._variant)
        if form == "onnx" and name != "onnxruntime":
            raise Unsupported(f"variant '{self._variant.name}' runs in {name}, which is not profiled; choose another")
        return self._in_ort(run) if form == "onnx" else self._in_torch(run)

    def _engine_seconds(self, run: _Run, call: Callable[[], object]) -> float:
        """Return the median time of a call."""
        for _ in range(_WARMUP):
            call()
        times = []
        for _ in range(run.calls):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return median(times)

    def _in_ort(self, run: _Run) -> Profile:
        ort = ort_session.package()
        path = self._variant.path()
        given = dict(run.inputs)
        with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
            seconds = 0.0
            for profiled in (False, True):
                options = ort_session.options_of(ort, path, None)
                options.intra_op_num_threads = self._threads
                options.enable_profiling = profiled
                options.profile_file_prefix = str(Path(folder) / "profile")
                try:
                    session = ort_session.create(ort, path, options, ["CPUExecutionProvider"])
                    found = self._engine_seconds(run, lambda session=session: session.run(None, given))  # type: ignore[misc]
                except ort_session.errors_of(ort) as error:
                    why = ort_session.reason_of(error)
                    raise InvalidArgument(f"variant '{self._variant.name}' cannot be profiled: {why}") from error
                if not profiled:
                    seconds = found
            events = json.loads(Path(session.end_profiling()).read_text())
        calls = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])
        return Profile(run.rows, seconds, self._read(run, events, calls[_WARMUP:]))

    def _read(self, run: _Run, events: list[dict[str, Any]], calls: list[dict[str, Any]]) -> tuple[OperatorTime, ...]:
        """Return the operators of ONNX Runtime's events, and keep those of the calls that count."""
        start, end = calls[0]["ts"], calls[-1]["ts"] + calls[-1]["dur"]
        times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(calls))
        number = 0
        for event in sorted(events, key=lambda event: event["ts"]):
            if not start <= event["ts"] <= end:
                continue
            self._keep(run, event)
            while event["ts"] > calls[number]["ts"] + calls[number]["dur"]:
                number += 1
            if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
                node = event["name"].removesuffix("_kernel_time")
                times[node, event["args"]["op_name"]][number] += event["dur"] / 1e6
        found = [OperatorTime(node, operator, median(each)) for (node, operator), each in times.items()]
        return tuple(sorted(found, key=lambda each: -each.seconds))

    def _in_torch(self, run: _Run) -> Profile:
        engine = load_engine(
            EngineSpec(
                self._variant.path(),
                format=self._variant.serving.format,
                device="cpu",
                threads=self._threads,
                allow_code=self._allow_code,
            )
        )
        from torch.profiler import ProfilerActivity, profile

        seconds = self._engine_seconds(run, lambda: engine.run(run.inputs))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(run.calls):
                engine.run(run.inputs)
        engine.close()
        with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            for event in json.loads(path.read_text())["traceEvents"]:
                self._keep(run, event)
        averages = [each for each in profiler.key_averages() if each.self_cpu_time_total > 0]
        found = [
            OperatorTime(each.key, each.key, each.self_cpu_time_total / run.calls / 1e6, each.count / run.calls)
            for each in averages
        ]
        return Profile(run.rows, seconds, tuple(sorted(found, key=lambda each: -each.seconds)))

    def _keep(self, run: _Run, event: dict[str, Any]) -> None:
        """Keep an event, with the batch size as its process, which viewers show apart."""
        if not any(each["pid"] == run.rows for each in self.events):
            name = {"name": f"{run.rows} rows"}
            self.events.append({"name": "process_name", "ph": "M", "pid": run.rows, "args": name})
        if event.get("ph") == "X":
            self.events.append({**event, "pid": run.rows})
