"""PyTorch's engines in a pipeline, with and without CUDA graphs, on a fake device."""

from __future__ import annotations

import gc
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ingot
from benchmarks.gpu.models import specs, write_program
from ingot.errors import EngineLost, InternalError, InvalidArgument, TooLarge
from ingot.runtime import EngineSpec, Limits, Model, ModelSource, ServingTerms, Settings, load_engine
from ingot.runtime.engines import loader, opening
from ingot.runtime.engines.pytorch import torch_engine
from ingot.runtime.engines.pytorch.torch_engine import TorchEngine
from ingot.runtime.engines.pytorch.torch_lane import CudaBackend, TorchLane
from ingot.runtime.gpu import precision
from ingot.runtime.gpu.graphs import GraphOptions, obstacle, sizes
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.tensors import Array, DType
from tests.export.programs import Lowered, archive
from tests.runtime.engines.test_torch_program import lowered
from tests.runtime.gpu.fake_device import FakeDevice, UnorderedAccess, span_of
from tests.runtime.gpu.fake_torch import FakeTorch, pipelined
from tests.runtime.gpu.test_pipeline import Faulty
from tests.support import matrix, run_python

pytestmark = pytest.mark.matrix  # against a fake device, until they have run on a GPU

GRAPHS = GraphOptions(most=8, batch="batch", padded=True)


class Words(nn.Module):
    """An embedding, which refuses values that are not valid, and layers; changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        words = self.embed(ids)
        hidden = torch.relu_(torch.tanh(words + shift[:, None, None]))
        return {
            "words": words,
            "scores": torch.softmax(self.out(hidden), -1),
            "small": hidden.bfloat16(),
            "flag": hidden == 0,
        }


@pytest.fixture(scope="module")
def words() -> Lowered:
    return lowered(Words(), "ids:int64[batch,5]", "shift:float32[batch]")


def batch(seed: int, samples: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 10, (samples, 5))
    return {"ids": ids, "shift": random.standard_normal(samples).astype(np.float32)}


def backend_of(engine: TorchEngine) -> FakeTorch:
    assert isinstance(engine._backend, FakeTorch)
    return engine._backend


def check(answer: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert answer.keys() == expected.keys()
    for name, array in expected.items():
        assert answer[name].dtype == array.dtype
        np.testing.assert_allclose(np.asarray(answer[name], np.float32), np.asarray(array, np.float32), atol=1e-6)


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["eager", "graphs"])
def test_lanes_answer_as_the_cpu_at_any_batch_size(words: Lowered, graphs: GraphOptions | None) -> None:
    engine, plain = pipelined(words.engine(), FakeDevice(), graphs), words.engine()
    lanes = [engine, *engine.more_lanes(2)]
    assert engine.settings["pipeline"] == "on"
    assert engine.settings["cuda_graphs"] == ("off" if graphs is None else "1,2,4,8")

    def serve(index: int) -> list[tuple[dict[str, Array], int]]:
        return [(lanes[index].run(batch(seed, 1 + seed % 11)), seed) for seed in range(index, 60, 3)]

    with ThreadPoolExecutor(3) as threads:
        results = [result for part in threads.map(serve, range(3)) for result in part]
    for answer, seed in results:  # only now: no answer may be overwritten by a later call
        check(answer, plain.run(batch(seed, 1 + seed % 11)))
    assert (backend_of(engine).replays > 0) == (graphs is not None)


def test_a_size_is_captured_once_and_then_replayed(words: Lowered) -> None:
    engine, plain = pipelined(words.engine(), FakeDevice(), GRAPHS), words.engine()
    backend = backend_of(engine)
    engine.run(batch(0, 4))
    launched = backend.launched
    for seed in range(5):
        check(engine.run(batch(seed, 4)), plain.run(batch(seed, 4)))
    assert (backend.launched, backend.replays) == (launched, 6)
    check(engine.run(batch(9, 3)), plain.run(batch(9, 3)))  # with a copy of the last sample for each input
    assert (backend.launched, backend.replays) == (launched + 2, 7)
    check(engine.run(batch(9, 9)), plain.run(batch(9, 9)))  # larger than any that is captured
    assert backend.replays == 7


def test_batches_are_only_enlarged_where_samples_do_not_affect_each_other(words: Lowered) -> None:
    engine = pipelined(words.engine(), FakeDevice(), GraphOptions(most=8, batch="batch", padded=False))
    for samples in (3, 3, 4, 4):
        engine.run(batch(0, samples))
    assert backend_of(engine).replays == 2


def test_inputs_that_a_larger_batch_moved_are_captured_again(words: Lowered) -> None:
    engine, plain = pipelined(words.engine(), FakeDevice(), GRAPHS), words.engine()
    for samples in (2, 2, 500, 2, 2):
        check(engine.run(batch(samples, samples)), plain.run(batch(samples, samples)))
    assert backend_of(engine).replays == 4


def test_a_failed_capture_is_logged_once_and_all_batches_run(words: Lowered, caplog: pytest.LogCaptureFixture) -> None:
    engine, plain = pipelined(words.engine(), FakeDevice(), GRAPHS), words.engine()
    lanes = [engine, *engine.more_lanes(1)]
    backend_of(engine).failing = RuntimeError("operation not permitted when stream is capturing\nwith details")
    for seed in range(6):
        check(lanes[seed % 2].run(batch(seed, 1 + seed)), plain.run(batch(seed, 1 + seed)))
    assert caplog.messages == [
        "batches run without CUDA graphs: RuntimeError: operation not permitted when stream is capturing with details"
    ]
    assert (backend_of(engine).replays, engine.settings["cuda_graphs"]) == (0, "off")


class Captures:
    """The parts of PyTorch that capture: its allocator keeps recording if a capture ends before it reaches that.

    Attributes:
        fault: where the next capture fails.
        recording: the pools whose capture has not ended.
        users: how many graphs use the pool.
        cleared: how often the workspaces of products were freed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.fault, self.users, self.cleared = "", 0, 0
        self.recording: list[tuple[int, int]] = []
        outer = self

        class Graph:
            capturing = valid = owns = False

            def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
                if outer.fault == "before the allocator":
                    raise RuntimeError(outer.fault)
                outer.recording.append(pool)
                outer.users += 1
                self.capturing, self.valid = outer.fault != "begin", outer.fault in ("", "work")
                if outer.fault == "begin":
                    raise RuntimeError(outer.fault)

            def capture_end(self) -> None:
                capturing, self.capturing = self.capturing, False
                if not (capturing and self.valid):
                    raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
                outer.end_allocate(0, outer.recording[-1])
                self.owns = True

            def reset(self) -> None:
                outer.users -= self.owns
                self.owns = False

            __del__ = reset

            def replay(self) -> None:
                assert self.owns

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: torch.Stream(device="cpu"))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def end_allocate(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.users -= 1

    def clear(self) -> None:
        self.cleared += 1


def test_after_a_failed_capture_the_allocator_does_not_record(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Captures(monkeypatch)
    backend = CudaBackend(1)

    def work() -> None:
        if found.fault.startswith("work"):
            raise ValueError(found.fault)

    for found.fault in ("before the allocator", "begin", "work", "work, not valid", "end"):
        with pytest.raises((RuntimeError, ValueError), match=found.fault if found.fault != "end" else "previous error"):
            backend.capture(work)
        gc.collect()  # the graph, which the exception refers to
        assert (found.recording, found.users) == ([], 0), found.fault
    found.fault = ""
    replay = backend.capture(work)
    replay()
    assert (found.recording, found.users) == ([], 1)
    found.fault = "end"
    with pytest.raises(RuntimeError, match="previous error"):
        backend.capture(work)
    replay()
    assert (found.recording, found.users) == ([], 1)


def test_workspaces_of_products_are_freed_with_the_last_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Captures(monkeypatch)
    cleared = []
    for backend in (CudaBackend(0), CudaBackend(1)):
        backend.close()
        cleared.append(found.cleared)
    assert cleared == [0, 1]  # graphs of the other one may use them


def test_models_with_variable_sizes_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = lowered(Words(), "ids:int64[batch,seq=1..40]", "shift:float32[batch]")
    engine = pipelined(made.engine(), FakeDevice(), GRAPHS)
    assert engine.settings["cuda_graphs"] == "off"
    assert "without CUDA graphs: the size of 'seq' of 'ids' is not fixed" in caplog.text
    assert obstacle(engine.signature)


def test_a_model_without_a_batch_has_one_graph() -> None:
    made = lowered(nn.Linear(3, 2), "x:float32[4,3]")
    engine = pipelined(made.engine(), FakeDevice(), GraphOptions(most=8, batch=None, padded=True))
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    for factor in range(3):
        check(engine.run({"x": factor * values}), made.engine().run({"x": factor * values}))
    assert backend_of(engine).replays == 3


@pytest.mark.matrix
@pytest.mark.parametrize("name", matrix("bert", "resnet50", "decoder"))
def test_larger_models_answer_as_the_cpu(tmp_path: Path, name: str) -> None:
    spec, path = specs(small=True)[name], tmp_path / "model.pt2"
    write_program(spec, path, DType.FP32)
    engine = pipelined(
        load_engine(EngineSpec(path, format="pt2", device="cpu", threads=1, allow_code=True)), FakeDevice(), GRAPHS
    )
    plain = load_engine(EngineSpec(path, format="pt2", device="cpu", threads=1, allow_code=True))
    lanes = [engine, *engine.more_lanes(1)]
    random = np.random.default_rng(1)
    for number in range(8):
        feed = {"x": np.concatenate([spec.sample(random, DType.FP32) for _ in range(2 + number // 2 % 2)])}
        np.testing.assert_allclose(lanes[number % 2].run(feed)["y"], plain.run(feed)["y"], rtol=1e-4, atol=1e-5)
    assert backend_of(engine).replays == 8


def test_a_graph_that_computes_other_outputs_is_not_used(
    words: Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeTorch, "capture", lambda self, work: lambda: None)
    engine, plain = pipelined(words.engine(), FakeDevice(), GRAPHS), words.engine()
    for seed in range(3):
        check(engine.run(batch(seed, 4)), plain.run(batch(seed, 4)))
    assert caplog.messages == [
        "batches run without CUDA graphs: Unsupported: a replayed batch has other outputs than one without a graph"
    ]


def test_sizes_are_few() -> None:
    assert sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert sizes(1) == [1]
    assert sizes(100)[-2:] == [96, 100]
    assert sizes(10_000)[-2:] == [384, 512]


class Run:
    """Three lanes of a model, driven by one thread: a batch begins as soon as a lane is free."""

    def __init__(self, made: Lowered, device: FakeDevice, graphs: GraphOptions | None = GRAPHS):
        self.device = device
        self.plain = made.engine()
        self.engine = pipelined(made.engine(), device, graphs)
        self.engines = [self.engine, *self.engine.more_lanes(2)]

    def submit_all(self, rounds: int = 4) -> None:
        idle = deque(lane for each in self.engines if (lane := each._lane) is not None)
        flying: deque[tuple[TorchLane, dict[str, Array]]] = deque()
        for number in range(3 * rounds):
            samples = (8, 8, 3, 2, 5)[number % 5]
            if not idle:
                self.finish(*flying[0])
                idle.append(flying.popleft()[0])
            inputs = batch(number, samples)
            with torch.no_grad():
                idle[0]._lane.start(inputs)
            flying.append((idle.popleft(), inputs))
        for lane, inputs in flying:
            self.finish(lane, inputs)

    def finish(self, lane: TorchLane, inputs: Mapping[str, Array]) -> None:
        expected = self.plain.run(inputs)
        results = lane._lane.finish()
        for result in results:
            self.device.touch(span_of(result), writes=False)
        check(dict(zip(expected, results, strict=True)), expected)


@pytest.mark.matrix
def test_batches_in_flight_use_no_memory_early(words: Lowered) -> None:
    for graphs in (None, GRAPHS):
        run = Run(words, FakeDevice((1, 20)), graphs)
        run.submit_all(8)
        assert (backend_of(run.engine).replays > 3) == (graphs is not None)


@pytest.mark.parametrize("fault", ["compute", "copy out", "end"])
def test_a_missing_wait_is_found(words: Lowered, fault: str) -> None:
    with pytest.raises(UnorderedAccess):
        Run(words, Faulty(fault)).submit_all()


def outputs_where_the_graph_has_them(self: Any, values: Any, like: Any, addresses: Any) -> Any:
    """Leave outputs in the memory that graphs share."""
    outputs: list[torch.Tensor] = []
    replay = self._backend.capture(lambda: outputs.extend(self._call([*values])))
    return type("Captured", (), {"addresses": addresses, "inputs": values, "outputs": outputs, "replay": replay})


def one_graph_for_all_lanes(self: Any, *arguments: Any, graphs: dict[Any, Any] = {}) -> Any:  # noqa: B006 - shared
    """Replay the graph of the first lane in all of them."""
    self._captured = graphs.setdefault(self._backend, {})
    for size, found in list(self._captured.items()):
        self._captured[size] = type(found)(arguments[3], found.inputs, found.outputs, found.replay)
    return RUN_CAPTURED(self, *arguments)


def graphs_of_earlier_addresses(self: Any, *arguments: Any) -> Any:
    """Keep graphs although the inputs have moved."""
    for size, found in list(self._captured.items()):
        self._captured[size] = type(found)(arguments[3], found.inputs, found.outputs, found.replay)
    return RUN_CAPTURED(self, *arguments)


RUN_CAPTURED = TorchLane._run_captured
MUTATIONS: dict[str, Callable[..., Any]] = {
    "_capture": outputs_where_the_graph_has_them,
    "_run_captured": one_graph_for_all_lanes,
}


@pytest.mark.parametrize("method", MUTATIONS)
def test_graphs_that_share_memory_of_batches_in_flight_are_found(
    words: Lowered, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchLane, method, MUTATIONS[method])
    with pytest.raises(AssertionError):  # an unordered access, or another batch's answer
        Run(words, FakeDevice((1, 20))).submit_all(8)


def test_a_graph_of_earlier_addresses_is_found(words: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchLane, "_run_captured", graphs_of_earlier_addresses)
    engine = pipelined(words.engine(), FakeDevice(), GRAPHS)
    engine.run(batch(0, 2))
    engine.run(batch(0, 500))
    with pytest.raises(InternalError, match="not memory of the device, or was freed"):
        engine.run(batch(0, 2))


def test_samples_that_are_not_filled_are_found(words: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchLane, "_fill", lambda *_: None)
    engine = pipelined(words.engine(), FakeDevice(), GRAPHS)
    with pytest.raises(InvalidArgument, match="index out of range"):
        engine.run(batch(0, 3))


def test_the_last_lane_returns_the_memory(words: Lowered) -> None:
    device = FakeDevice()
    pinnable = device.pinnable
    engine = pipelined(words.engine(), device, GRAPHS)
    lanes = [engine, *engine.more_lanes(2)]
    for lane in lanes:
        lane.run(batch(1, 4))
    blocks = {lane._lane._lane._block for lane in lanes if lane._lane is not None}
    for lane in lanes[:2]:
        lane.close()
    assert lanes[2].run(batch(4, 4))["scores"].shape == (4, 5, 3)
    lanes[2].close()
    gc.collect()
    assert not blocks & device.blocks.keys()
    assert not device._streams
    assert device.pinnable == pinnable


def test_too_little_memory_and_a_failed_device_are_reported_as_such(
    words: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    engine = pipelined(words.engine(), device)

    assert engine._lane is not None
    call = engine._lane._call
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
        torch.AcceleratorError("CUDA error: out of memory\nmore"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ):

        def refuse(values: list[torch.Tensor], error: Exception = error) -> list[torch.Tensor]:
            raise error

        engine._lane._call = refuse
        with pytest.raises(TooLarge, match=re.escape(str(error).partition("\n")[0])):
            engine.run(batch(0, 2))
    engine._lane._call = call
    assert engine.run(batch(0, 2))["scores"].shape == (2, 5, 3)
    device.fail("error 700")
    with pytest.raises(EngineLost, match="700"):
        engine.run(batch(0, 2))
    assert engine.down == "error 700"
    engine.close()


def test_inputs_are_assembled_in_pinned_memory(words: Lowered) -> None:
    device = FakeDevice()
    engine = pipelined(words.engine(), device)
    assert engine.allocate(engine.signature.inputs[0], (4, 5)).ctypes.data in device.pinned


def test_on_a_gpu_an_engine_opens_a_pipeline(words: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    opened: list[str] = []

    def pipeline_of(name: str) -> Pipeline:
        opened.append(name)
        return Pipeline(device)

    monkeypatch.setattr(torch_engine, "pipeline_of", pipeline_of)

    def refuse(index: int) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    engine: Any = words.engine()
    engine._device = "cuda:1"
    monkeypatch.setattr(torch_engine, "CudaBackend", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine._loaded(GRAPHS)
    assert not device._streams
    monkeypatch.setattr(torch_engine, "CudaBackend", lambda index: FakeTorch(device))
    engine._loaded(GRAPHS)
    assert opened == ["cuda:1"] * 2
    check(engine.run(batch(0, 3)), words.engine().run(batch(0, 3)))
    assert engine.settings["cuda_graphs"] == "1,2,4,8"


@pytest.mark.matrix
def test_the_precision_of_products_is_that_of_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import warnings
import torch
from ingot.errors import Unsupported
from ingot.runtime.engines.pytorch.torch_engine import use_torch_precision
warnings.simplefilter("error")
for _ in range(2):
    use_torch_precision("f32")
print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
try:
    use_torch_precision("tf32")
except Unsupported as error:
    print(error)
"""
    first, second = run_python(code).splitlines()
    assert first == "False False"
    assert "computed in tf32 and another one of this process in f32" in second
    assert "--isolate all" in second
    monkeypatch.setattr(precision, "_users", Counter())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch_engine.use_torch_precision("tf32")
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_a_model_whose_captures_fail_shows_that_it_has_no_graphs(
    words: Lowered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened = opening.open_engine

    def open_engine(spec: EngineSpec) -> TorchEngine:
        engine = pipelined(opened(replace(spec, device="auto", threads=1, graphs=None)), FakeDevice(), spec.graphs)
        backend_of(engine).failing = RuntimeError("operation not permitted")
        return engine

    monkeypatch.setattr(loader, "open_engine", open_engine)
    settings = Settings(device="fake:0", isolate="none", allow_code=True, limits=Limits(max_batch=4))
    model = Model("m", "1", ModelSource.of_variant(archive(words).variant(), settings, "m"), ServingTerms(settings))
    model.load()
    assert model.engine_settings["cuda_graphs"] == "off"
    assert "is ready on fake:0" in caplog.messages[-1]
    assert "cuda_graphs off" in caplog.messages[-1]
    model.close()


@pytest.mark.matrix
def test_a_server_captures_the_sizes_of_its_batches(words: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    device, engines, plain = FakeDevice(), [], words.engine()

    def open_engine(spec: EngineSpec) -> TorchEngine:
        engines.append(
            pipelined(opening.open_engine(replace(spec, device="auto", threads=1, graphs=None)), device, spec.graphs)
        )
        return engines[-1]

    monkeypatch.setattr(loader, "open_engine", open_engine)
    settings: dict[str, Any] = {"device": "fake:0", "isolate": "none", "allow_code": True, "max_batch": 4}
    with ingot.serve(archive(words), http_port=0, grpc_port=0, **settings) as server:
        (engine,) = engines
        assert (len(engine._users), engine.capabilities.captured) == (3, (1, 2, 4))
        backend = backend_of(engine)
        before = backend.launched

        def request(number: int) -> None:
            with ingot.Client(server.http_url if number % 2 else server.grpc_url) as client:
                answer = client.infer("model", batch(number, 1 + number % 2))
            check(answer, plain.run(batch(number, 1 + number % 2)))

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(request, range(40)))
        assert backend.replays
        # Nothing was left to capture: only copies of samples, one for each input, fill batches of three.
        assert backend.launched - before <= 2 * 40
    assert not device._streams
