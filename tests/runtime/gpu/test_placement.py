"""Which GPU a model runs on, with the libraries of a machine that has some."""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
from onnx import NodeProto, TensorProto, helper

import ingot
from ingot.errors import InvalidArgument, Unavailable, Unsupported
from ingot.model_store import Evidence, MemoryEvidence
from ingot.runtime import EngineSpec, LoadSpec, Settings, load_engine
from ingot.runtime.engines import loader, pipelined
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.engines.ort import convolutions, ort_session
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.gpu import precision
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.runtime.gpu.turns import turns_of
from ingot.runtime.loading import load_spec, placement
from ingot.runtime.loading.placement import Need, Placement
from ingot.runtime.machine import devices, nvml
from ingot.tensors import DType, Signature, TensorSpec
from tests import onnx_models
from tests.runtime.gpu.fake_device import FakeDevice
from tests.runtime.variants import SIZE, Made, archive

GIB = 1 << 30
# 2 GiB of weights, and 2.25 GiB to 18 GiB with the activations of 1 to 64 samples.
NEED = Need(weights=2 * GIB, activations=lambda samples: samples * GIB // 4, most=64)


class Driver:
    """NVIDIA's driver, of GPUs by their identifiers."""

    def __init__(self, visible: list[str]):
        self._visible = visible

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the library's names
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._visible)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0 if index < len(self._visible) else 101

    def cuDeviceGetUuid_v2(self, identifier: Any, device: Any) -> int:  # noqa: N802
        text = self._visible[device.value]
        ctypes.memmove(identifier._obj, uuid.UUID(text.partition("-")[2]).bytes, 16)
        return 0


class Management(ModuleType):
    """``pynvml`` of the same GPUs: their free and used bytes, and their utilization in percent."""

    nvmlMemory_v2 = 0x02000028  # noqa: N815 - as the package names it

    def __init__(self, gpus: dict[str, tuple[int, int]]):
        super().__init__("pynvml")
        self.gpus = gpus
        self.percent: dict[int, int] = {}

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        if name not in self.gpus:
            raise RuntimeError("Not Found")
        return list(self.gpus).index(name)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> Any:  # noqa: N802
        assert version == self.nvmlMemory_v2
        free, used = list(self.gpus.values())[handle]
        return SimpleNamespace(total=free + used, reserved=0, free=free, used=used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if list(self.gpus)[handle].startswith("MIG"):
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=self.percent.get(handle, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts GPUs into the machine, whose free and used memory is given in GiB."""
    library = ctypes.CDLL

    def put(*gpus: tuple[str, int, int]) -> Management:
        found = {f"{kind}-{uuid.uuid4()}": (free * GIB, used * GIB) for kind, free, used in gpus}
        driver, management = Driver(list(found)), Management(found)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else library(name))
        monkeypatch.setattr(devices, "has_cuda", lambda: bool(found))
        monkeypatch.setitem(sys.modules, "pynvml", management)
        return management

    return put


def test_the_memory_of_visible_gpus(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(("GPU", 10, 70), ("GPU", 60, 20), ("GPU", 40, 40)).percent[1] = 35
    assert nvml.roomiest() == 1
    assert nvml.memory_used() == 130 * GIB
    assert nvml.utilization_of(1) == 0.35
    assert nvml.memory_of(3) is nvml.utilization_of(3) is None
    machine(("MIG", 7, 3))
    assert nvml.roomiest() == 0
    assert nvml.memory_used() == 3 * GIB
    assert nvml.utilization_of(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert nvml.memory_of(0) is None
    assert (nvml.roomiest(), nvml.memory_used()) == (0, 0)
    machine()
    assert nvml.roomiest() == 0
    assert nvml.memory_used() == 0


CUDA = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
CPU = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])


def test_a_driver_that_cannot_be_used_is_logged_once(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as in an engine process that may not do what the driver does in its start."""
    has_cuda = devices.has_cuda
    machine(("GPU", 10, 70))
    monkeypatch.setattr(devices, "has_cuda", has_cuda)
    monkeypatch.setattr(devices, "_driver", devices._driver.__wrapped__)
    devices._warn_of_unused_gpus.cache_clear()
    assert has_cuda()
    for code in (100, 304, 304):  # the first is that of a machine, or a process, without GPUs
        monkeypatch.setattr(Driver, "cuInit", lambda self, flags, code=code: code)
        assert not has_cuda()
        assert ort_session.pick_device(CUDA, "cpu") == "cpu"
        assert not caplog.messages  # those who asked for the CPU do not read of 'auto'
    for package in (CUDA, CUDA, CPU):
        assert ort_session.pick_device(package, "auto") == "cpu"
    with pytest.raises(Unsupported, match="'cuda' is not available: NVIDIA's driver cannot be used, error 304"):
        ort_session.pick_device(CUDA, "cuda")
    (message,) = caplog.messages
    assert "run on the CPU: NVIDIA's driver cannot be used, error 304 in cuInit; set --device cpu" in message


def printing(missing: set[str]) -> ModuleType:
    """Return a substitute for ONNX Runtime, which prints while folders are missing that it was not asked to read."""
    ort = ModuleType("onnxruntime")
    code = """
def preload_dlls(directory=None):
    if directory is not None:
        missing.discard(directory)
    elif missing:
        print("Failed to load libcublas.so.13")
"""
    vars(ort)["missing"] = missing
    exec(code, vars(ort))  # in whose names it finds print
    return ort


def test_libraries_of_cuda_are_found_in_another_folder_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "nvidia" / name / "lib" for name in ("cu13", "cudnn")]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert ort_session._preload(printing({*map(str, folders)})) == ""
    assert ort_session._preload(printing({"nowhere"})) == "Failed to load libcublas.so.13"
    # That of the package itself, as one that is built with CUDA has it.
    monkeypatch.setattr(onnxruntime, "cuda_version", "13.0")
    assert "Failed to load libcublasLt.so.13" in ort_session._preload(onnxruntime)
    assert "Failed to load libcublasLt.so.13" in ort_session.missing_libraries()
    ort_session._preload.cache_clear()
    assert capsys.readouterr().out == ""


def test_where_a_session_runs(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    devices._warn_of_unused_gpus.cache_clear()
    machine(("GPU", 10, 70), ("GPU", 60, 20))
    named = {"auto": "cuda:1", "cuda": "cuda:1", "cuda:0": "cuda:0", "auto:0": "cuda:0", "cpu": "cpu"}
    assert {device: ort_session.pick_device(CUDA, device) for device in named} == named
    assert ort_session.pick_device(CPU, "auto") == ort_session.pick_device(CPU, "auto:1") == "cpu"
    with pytest.raises(Unsupported, match="lacks CUDA"):
        ort_session.pick_device(CPU, "cuda:0")
    with pytest.raises(InvalidArgument, match="has no device 'npu:0'"):
        ort_session.pick_device(CUDA, "npu:0")
    assert "on the CPU: this onnxruntime lacks CUDA" in caplog.text
    machine()
    assert ort_session.pick_device(CUDA, "auto") == "cpu"
    with pytest.raises(Unsupported, match="no NVIDIA driver or GPU"):
        ort_session.pick_device(CUDA, "cuda")


def test_a_session_computes_in_the_pipelines_stream() -> None:
    pipeline = Pipeline(FakeDevice())
    plain = {"device_id": "3", "use_tf32": "0"}
    stream = {"has_user_compute_stream": "1", "user_compute_stream": str(pipeline.compute)}
    for given, options in ((pipeline, {**plain, **stream}), (None, plain)):
        expected = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        assert ort_session.providers_of(CUDA, "cuda:3", given) == expected
    expected = [("CUDAExecutionProvider", {**plain, "use_tf32": "1", "enable_cuda_graph": "1"}), "CPUExecutionProvider"]
    assert ort_session.providers_of(CUDA, "cuda:3", None, tf32=True, graphs=True) == expected


class Kept(Exception):
    """Ends the load of a model that the CPU cannot run."""


class Opened:
    """Sessions that were asked for, by their providers; one on the CPU runs. ``lacking`` cannot be loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacking: str = ""):
        self.providers: list[Any] = []
        self.failing = ""
        open_session = onnxruntime.InferenceSession

        def opened(path: str, options: Any, *, providers: list[Any], **how: Any) -> Any:
            self.providers.append(providers)
            if self.failing and "enable_cuda_graph" in str(providers):
                raise RuntimeError(self.failing)
            session = open_session(path, options, providers=["CPUExecutionProvider"], **how)
            names = [each if isinstance(each, str) else each[0] for each in providers]
            monkeypatch.setattr(session, "get_providers", lambda: [name for name in names if name != lacking])
            for kind in ("input", "output"):
                infos = [SimpleNamespace(name="Cuda") for _ in getattr(session, f"get_{kind}s")()]
                monkeypatch.setattr(session, f"get_{kind}_memory_infos", lambda infos=infos: infos)
            return session

        monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
        monkeypatch.setattr(devices, "has_cuda", lambda: True)
        names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
        self.device = FakeDevice()

        def keep(providers: list[Any]) -> None:
            self.providers.append(providers)
            raise Kept

        self.keep = keep
        monkeypatch.setattr(pipelined, "open_device", lambda name: self.device)


def test_tensorrt_compiles_for_all_batches_and_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Opened(monkeypatch)
    path, cache = onnx_models.affine(tmp_path), tmp_path / "store" / "trt"
    engine = load_engine(
        EngineSpec(path, engine="tensorrt", device="cuda:1", precision="fp16", cache=cache, max_batch=32)
    )
    assert (engine.device, engine.platform) == ("cuda:1", "onnxruntime_tensorrt")
    assert cache.is_dir()
    (name, options), (second, _), last = found.providers[-1]
    assert (name, second, last) == ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    stream = options.pop("user_compute_stream")
    assert int(stream) in found.device._streams
    assert options == {
        "device_id": "1",
        "has_user_compute_stream": "1",
        "trt_fp16_enable": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(cache),
        "trt_profile_min_shapes": "x:1x3",
        "trt_profile_opt_shapes": "x:32x3",
        "trt_profile_max_shapes": "x:32x3",
    }
    engine.close()
    assert not found.device._streams


@pytest.mark.matrix
def test_without_tensorrt_its_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = onnx_models.affine(tmp_path)
    for device in ("cpu", "auto"):
        with pytest.raises(Unsupported, match=r"'tensorrt' is not available on device.*pip install tensorrt"):
            load_engine(EngineSpec(path, engine="tensorrt", device=device))
    cache = tmp_path / "store" / "trt"
    with pytest.raises(Unsupported, match="'tensorrt' is not available"):
        load_engine(EngineSpec(path, engine="tensorrt", cache=cache), Isolation(why="a test", required=True))
    assert cache.is_dir()  # which an engine process could not create
    found = Opened(monkeypatch, lacking="TensorrtExecutionProvider")
    with pytest.raises(Unsupported, match=r"could not load TensorRT.*pip install tensorrt"):
        load_engine(EngineSpec(path, engine="tensorrt", device="cuda:0"))
    assert not found.device._streams
    with pytest.raises(Unsupported, match="precision 'int3' with 'tensorrt'"):
        load_engine(EngineSpec(path, engine="tensorrt", device="cuda:0", precision="int3"))


def convolution(folder: Path, kind: int, weights: str = "w") -> Path:
    """y = the convolution of x [batch, 1, 4, 4] with weights of an element type; computed weights, if named ``w2``."""
    constant = helper.make_tensor("w", kind, (1, 1, 3, 3), np.ones(9))
    nodes = [helper.make_node("Neg", ["w"], ["w2"]), helper.make_node("Conv", ["x", weights], ["y"])]
    shape: onnx_models.Dims = ("batch", 1, 4, 4)
    outputs: list[tuple[str, int, onnx_models.Dims]] = [("y", kind, ("batch", 1, 2, 2))]
    return onnx_models.save(folder / "convolution.onnx", nodes, [("x", kind, shape)], outputs, [constant])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have no model on a GPU yet."""
    monkeypatch.setattr(precision, "_users", Counter())
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)


def test_convolutions_in_half_precision_use_tensor_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """With ``use_tf32`` off, ONNX Runtime chooses kernels without tensor cores for them, too."""
    found, create = Opened(monkeypatch), ort_session.create
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    for kind, weights, cores in ((half, "w", "1"), (single, "w", "0"), (half, "w2", "0")):
        path = convolution(tmp_path, kind, weights)
        monkeypatch.setattr(ort_session, "create", lambda ort, path, options, providers: found.keep(providers))
        with pytest.raises(Kept):
            load_engine(EngineSpec(path, device="cuda:0"))
        assert found.providers[-1][0][1]["use_tf32"] == cores
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"  # so no product in 32 bits is in TF32
    # None of these models was opened, so another one may have the other precision; the next ones may not, even after it
    # was closed.
    monkeypatch.setattr(ort_session, "create", create)
    load_engine(EngineSpec(onnx_models.affine(tmp_path), device="cuda:0", precision="tf32")).close()
    with pytest.raises(Unsupported, match=r"in f32 and another one of this process in tf32.*until the process ends"):
        load_engine(EngineSpec(path, device="cuda:0"))


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MatMul", ["z", "v2"], ["u"]),
        helper.make_node("Einsum", ["z", "v"], ["u"], equation="ij,jk->ik"),
    ],
    ids=["transposed", "einsum"],
)
def test_products_in_32_bits_beside_convolutions_in_half_precision_are_found(tmp_path: Path, node: NodeProto) -> None:
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    constants = [
        helper.make_tensor("w", half, (1, 1, 1, 1), [1]),
        helper.make_tensor("v", single, (2, 2), np.ones(4)),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"]),
        helper.make_node("Transpose", ["v"], ["v2"]),
        node,
    ]
    inputs: list[tuple[str, int, onnx_models.Dims]] = [("x", half, (1, 1, 2, 2)), ("z", single, (2, 2))]
    outputs: list[tuple[str, int, onnx_models.Dims]] = [("y", half, (1, 1, 2, 2)), ("u", single, (2, 2))]
    path = onnx_models.save(tmp_path / "both.onnx", nodes, inputs, outputs, constants)
    assert convolutions.convolutions_of(path) == convolutions.Convolutions(any=True, half=False)


def test_a_file_with_a_node_without_inputs_has_no_known_convolutions(tmp_path: Path) -> None:
    """Engines refuse it, by a clear error."""
    model = helper.make_model(helper.make_graph([helper.make_node("Transpose", [], ["y"])], "g", [], []))
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    assert convolutions.convolutions_of(tmp_path / "odd.onnx") == convolutions.Convolutions()


def test_a_gpu_that_cannot_be_used_does_not_decide_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    Opened(monkeypatch, lacking="CUDAExecutionProvider")
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="could not use the GPU"):
        load_engine(EngineSpec(path, device="auto:0", precision="tf32"))
    engine = load_engine(EngineSpec(path, device="auto:0"))
    assert engine.device == "cpu"
    engine.close()


@pytest.mark.parametrize("choice", ["auto", "default", "nhwc", "heuristic"])
def test_the_fastest_options_of_convolutions_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, choice: str
) -> None:
    found, path = Opened(monkeypatch), convolution(tmp_path, TensorProto.FLOAT)
    # One option is faster than the defaults, and one cannot run.
    speeds = {"default": 3.0, "heuristic": 1.0}

    def seconds(run: Any, feeds: Any) -> float:
        assert [next(iter(feed.values())).shape[0] for feed in feeds] == [8, 7]
        run(feeds[0])
        name = order[len(measured)]
        measured.append(name)
        if name not in speeds:
            raise RuntimeError("no kernel")
        return speeds[name]

    order, measured = ["default", "nhwc", "heuristic"], list[str]()
    monkeypatch.setattr(convolutions, "_seconds", seconds)
    engine = load_engine(EngineSpec(path, device="cuda:0", convolutions=choice, gpu_arena="exact"))
    assert engine.settings["convolutions"] == ("heuristic" if choice == "auto" else choice)
    assert measured == (order if choice == "auto" else [])
    options = [each[0][1] for each in found.providers]
    assert all(each["arena_extend_strategy"] == "kSameAsRequested" for each in options)
    extra = [{**convolutions.CANDIDATES.get(name, {})} for name in (order if choice == "auto" else [choice])]
    for each, more in zip(options, extra, strict=True):
        assert more.items() <= each.items()
        assert ("prefer_nhwc" in each, "cudnn_conv_algo_search" in each) == (
            "prefer_nhwc" in more,
            "cudnn_conv_algo_search" in more,
        )
    engine.close()


@pytest.mark.parametrize(("times", "best"), [((1, 0.95, 2), "a"), ((1, 0.8, 0.7), "c"), ((1, 0.5, 0.7), "b")])
def test_options_must_gain_a_tenth(monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], best: str) -> None:
    left = iter(times)
    monkeypatch.setattr(convolutions, "_seconds", lambda run, feeds: next(left))
    assert convolutions.fastest(Signature((), ()), 64, ((name, name, len) for name in "abc")) == (best, best)


@pytest.mark.parametrize(("times", "most"), [((3, 2, 1), 2), ((1, 2, 3), 2)])
def test_two_sessions_are_open_while_options_are_measured(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], most: int
) -> None:
    class Session:
        def run(self, feed: Any) -> None: ...

    left, alive, seen = iter(times), weakref.WeakSet[Session](), list[int]()

    def opened() -> Iterator[Any]:
        for name in "abc":
            session = Session()
            alive.add(session)
            seen.append(len(alive))
            yield name, session, session.run
            del session

    monkeypatch.setattr(convolutions, "_seconds", lambda run, feeds: next(left))
    convolutions.fastest(Signature((), ()), 64, opened())
    assert seen == [1, 2, most]


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [2, 1]), (64, [8, 7])])
def test_batches_larger_than_those_of_requests_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, largest: int, sizes: list[int]
) -> None:
    timed: list[int] = []

    def seconds(run: Any, feeds: Any) -> float:
        timed.extend(len(feed["x"]) for feed in feeds)
        return 1.0

    monkeypatch.setattr(convolutions, "_seconds", seconds)
    x = TensorSpec("x", DType.FP32, ("batch", 2))
    convolutions.fastest(Signature((x,), (), "batch"), largest, [("default", None, len)])
    assert timed == sizes


def test_tf32_is_used_for_variants_that_were_measured_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Unsupported, match="only a GPU computes in tf32"):
        load_engine(EngineSpec(path, device="cpu", precision="tf32"))
    found = Opened(monkeypatch)
    monkeypatch.setattr(precision, "_users", Counter())
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # of a server that starts an engine process
    engine = load_engine(EngineSpec(path, device="cuda:0", precision="tf32"))
    assert engine.settings["precision"] == "tf32"
    assert found.providers[-1][0][1]["use_tf32"] == "1"
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ
    engine.close()
    with pytest.raises(Unsupported, match=r"in f32 and another one of this process in tf32.*--isolate all"):
        load_engine(EngineSpec(path, device="cuda:0"))
    monkeypatch.setattr(precision, "_users", Counter())
    for engine_name, kind in (("onnxruntime", "f32"), ("tensorrt", "fp16")):  # which uses TF32 where it may
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
        load_engine(EngineSpec(path, engine=engine_name, device="cuda:0", precision=kind)).close()
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"


def test_a_session_that_cannot_capture_is_opened_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, path = Opened(monkeypatch), onnx_models.affine(tmp_path)
    engine = load_engine(EngineSpec(path, device="cuda:0", graphs=GraphOptions(most=4, batch=None, padded=True)))
    assert isinstance(engine, OrtEngine)
    assert (engine.settings["cuda_graphs"], engine.more_lanes(2)) == ("1,2,4", [])
    engine.close()
    found.failing = "This session cannot use the graph capture feature as requested by the user"
    engine = load_engine(EngineSpec(path, device="cuda:0", graphs=GraphOptions(most=4, batch=None, padded=True)))
    assert isinstance(engine, OrtEngine)
    assert engine.settings["cuda_graphs"] == "off"
    assert len(engine.more_lanes(2)) == 2
    assert "without CUDA graphs: ONNX Runtime cannot load" in caplog.text
    assert found.failing in caplog.text
    assert ["enable_cuda_graph" in str(each) for each in found.providers] == [True, True, False]


def test_without_the_cuda_libraries_only_auto_falls_back_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime then opens the session with the providers that are left."""
    path, device = onnx_models.affine(tmp_path), FakeDevice()
    monkeypatch.setattr(ort_session, "pick_device", lambda *_: "cuda:0")
    monkeypatch.setattr(pipelined, "open_device", lambda name: device)
    providers = ["CPUExecutionProvider", "AzureExecutionProvider"]
    monkeypatch.setattr(ort_session, "providers_of", lambda *_, **__: providers)
    monkeypatch.setattr("onnxruntime.InferenceSession.get_providers", lambda session: providers[:1])
    monkeypatch.setattr(ort_session, "missing_libraries", lambda: ": Failed to load libcublas.so.13")
    sessions: list[Any] = []
    create, close_stream = ort_session.create, device.close_stream

    def created(*how: Any) -> Any:
        session = create(*how)
        sessions.append(weakref.ref(session))
        return session

    def close(stream: int) -> None:
        assert sessions[-1]() is None or len(sessions) == 2, "the session uses the stream"
        close_stream(stream)

    monkeypatch.setattr(ort_session, "create", created)
    monkeypatch.setattr(device, "close_stream", close)
    with pytest.raises(Unsupported, match=r"'cuda:0' is not available: ONNX Runtime could not use the GPU.*libcublas"):
        OrtEngine(path, device="cuda:0")
    assert not device._streams
    engine = OrtEngine(path, device="auto")
    assert engine.device == "cpu"
    assert engine.settings["pipeline"] == "off"
    assert "serving on the CPU" in caplog.text
    assert "libcublas.so.13" in caplog.text
    assert not device._streams
    assert not turns_of(device).shared
    engine.close()


def test_with_a_driver_that_is_too_old_a_model_has_one_batch_in_flight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise Unsupported("NVIDIA's driver cannot allocate memory of cuda:0 in the order of a stream")

    monkeypatch.setattr(pipelined, "open_device", refuse)
    assert pipelined.pipeline_of("cuda:0") is None
    assert "models on cuda:0 have one batch in flight: NVIDIA's driver cannot" in caplog.text


def test_a_divided_model_is_not_on_the_cpu_unasked(machine: Any) -> None:
    """Its processes then fail where they cannot use their GPUs."""
    machine(("GPU", 10, 70), ("GPU", 60, 20))
    assert {device: place(device, shards=2).devices for device in ("auto", "cpu", "cuda:0,1")} == {
        "auto": ["cuda"],
        "cpu": ["cpu"],
        "cuda:0,1": ["cuda:0,1"],
    }
    machine()
    assert place(shards=2).devices == ["auto"]


def place(device: str = "auto", need: Need | None = NEED, **settings: Any) -> Placement:
    return placement.place("m", lambda: need, Settings(device=device, **settings))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs whose context was opened."""
    names: list[str] = []
    monkeypatch.setattr(placement, "open_device", names.append)
    placement.contexts.clear()
    return names


@pytest.mark.usefixtures("opened")
def test_the_gpu_on_which_a_model_fits_and_that_is_least_busy_is_chosen(
    machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    machine(("GPU", 60, 20), ("GPU", 40, 40), ("GPU", 10, 70)).percent.update({0: 90, 1: 30})
    found = place()
    assert found.devices == ["auto:1"]
    assert found.max_batch == 64
    assert found.planned == {"cuda:1": 18 * GIB}
    others = "cuda:0 (60 GiB free, 90% busy), cuda:2 (10 GiB free, 0% busy)"
    reason = f"cuda:1 (40 GiB free, 30% busy) rather than {others}"
    assert found.reason == reason
    assert f"model m: placed on {reason}" in caplog.text
    # Memory that is planned for the first model, which is still loaded, is not free.
    second = place("cuda")
    assert second.devices == ["cuda:1"]
    third = place("cuda")
    assert third.devices == ["cuda:0"]
    second.release()
    assert place("cuda").devices == ["cuda:1"]
    found.release()
    third.release()
    machine(("GPU", 10, 70))
    assert place(need=Need(weights=GIB)).reason == ""


@pytest.mark.usefixtures("opened")
def test_instances_are_spread(machine: Any) -> None:
    machine(("GPU", 30, 50), ("GPU", 50, 30))
    assert place(instances=2).devices == ["auto:1", "auto:0"]
    found = place("cuda", need=Need(weights=GIB), instances=5)
    assert found.devices == ["cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert found.planned == {"cuda:0": 2 * GIB, "cuda:1": 3 * GIB}
    named = place("cuda:1,0", need=Need(weights=GIB), instances=2)
    assert named.devices == ["cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert named.reason == ""


def test_without_a_usable_gpu_devices_are_those_of_the_setting(machine: Any) -> None:
    machine(("GPU", 30, 50), ("GPU", 50, 30))
    assert place("auto", None, instances=2).devices == ["auto", "auto"]
    assert place("cpu").devices == ["cpu"]
    assert place("slate:0,1").devices == ["slate:0", "slate:1"]
    for device in ("cuda", "cuda:1,0"):  # a divided model chooses a GPU for each of its processes itself
        divided = place(device, shards=2)
        assert (divided.devices, divided.planned) == ([device], {})
    machine()
    assert place("cuda").devices == ["cuda"]


@pytest.mark.usefixtures("opened")
def test_batches_are_limited_to_what_fits(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(("GPU", 10, 70))
    found = place()
    assert found.max_batch == 32
    assert found.planned == {"cuda:0": 10 * GIB}
    assert [record.message for record in caplog.records] == [
        "model m: batches have at most 32 samples: it needs 18 GiB for batches of 64 (2 GiB of weights, 16 GiB "
        "of activations) in each instance, and 10 GiB are free on cuda:0; set --max-batch 32, or choose another "
        "--device"
    ]
    found.release()
    assert place(instances=2).max_batch == 12
    with pytest.raises(Unavailable, match=r"needs 2\.25 GiB for batches of 1 .* 2 GiB are free on cuda:0; choose"):
        place(instances=5)
    budget = {"cuda": 4 * GIB}
    assert place(memory_budget=budget).max_batch == 8
    with pytest.raises(Unavailable, match=r"'m' does not fit: .* and 2 GiB are its budget; raise --memory-budget"):
        place(instances=2, memory_budget=budget)


@pytest.mark.usefixtures("opened")
def test_a_budget_counts_memory_of_models_that_can_leave_as_free(machine: Any) -> None:
    management = machine(("GPU", 20, 0))
    first = place()
    gpu = next(iter(management.gpus))
    management.gpus[gpu] = (2 * GIB, 18 * GIB)
    first.ready(lambda: 0.0)
    assert first.measured == {"cuda:0": 18 * GIB}
    with pytest.raises(Unavailable, match=r"2 GiB are free on cuda:0"):
        place()
    assert place(memory_budget={"cuda": 20 * GIB}).max_batch == 64


@pytest.mark.usefixtures("opened")
def test_the_load_of_a_gpu_is_that_of_its_models_and_without_traffic_the_drivers(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(("GPU", 50, 30), ("GPU", 50, 30)).percent.update({0: 50, 1: 70})
    clock, seconds = [100.0], [7.0]
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    first = place(need=Need(weights=GIB))
    assert first.devices == ["auto:0"]
    first.ready(lambda: seconds[0])
    clock[0], seconds[0] = 110.0, 16.0
    second = place(need=Need(weights=GIB))
    assert second.devices == ["auto:1"]
    assert "cuda:0 (49 GiB free, 90% busy)" not in second.reason  # it is in use by now, so not counted twice
    assert "cuda:0 (50 GiB free, 90% busy)" in second.reason
    clock[0] = 120.0
    assert place(need=Need(weights=GIB)).devices == ["auto:0"]  # no traffic in the last 10 s


def test_a_variants_need_is_recorded_or_follows_from_the_bounds_of_its_graph(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(("GPU", 1, 1))
    monkeypatch.setattr(ort_session, "package", lambda: CUDA)
    plan = Evidence(memory=MemoryEvidence(fixed=1000, per_row=2000))
    cpu = Made("cpu", requires={"device": "cpu"})
    variants = archive([Made("planned", evidence=plan), Made("bounded"), Made("bare", goldens=()), cpu]).variants
    needs = {each.name: LoadSpec.of_variant(each, Settings(isolate="none")).needed() for each in variants}
    assert needs.pop("cpu") is None
    found = {name: (need.of(1), need.of(64)) for name, need in needs.items() if need is not None}
    size = variants[0].size
    assert found.pop("planned") == (size + 3000, size + 129000)
    assert found.pop("bare") == (size, size)
    (one, most), row = found.pop("bounded"), SIZE * 4
    assert 2 * row <= one - size <= 4 * row
    assert most - size == 64 * (one - size)
    assert [need.most for need in needs.values() if need is not None] == [64, 64, 64]
    assert [need.own for need in needs.values() if need is not None] == [True] * 3
    for engine, placed in (("tensorrt", True), ("openvino", False)):
        assert (LoadSpec.of_variant(variants[0], Settings(engine=engine)).needed() is not None) == placed
    monkeypatch.setattr(ort_session, "package", lambda: CPU)
    assert LoadSpec.of_variant(variants[0], Settings()).needed() is None


def test_unknown_memory_limits_nothing(machine: Any, monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    machine(("GPU", 1, 1), ("GPU", 1, 1))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = place()
    assert found.devices == ["auto:0"]
    assert found.max_batch == 64
    assert "cuda:0 (an unknown amount free, 0% busy)" in found.reason
    found.ready(lambda: 0.0)
    assert found.measured == {}
    assert opened == ["cuda:0"]


@pytest.mark.one_case
@pytest.mark.parametrize("usable", [True, False])
def test_a_server_places_its_models_and_shows_it(
    machine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: list[str],
    usable: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that is not usable is so in an engine process, which has no GPU in fact."""
    caplog.set_level("INFO")
    management = machine(("GPU", 10, 70), ("GPU", 60, 20))
    gpu = list(management.gpus)[1]
    wanted: list[str] = []

    def open_engine(spec: EngineSpec) -> OrtEngine:
        engine = OrtEngine(spec.path, device="cpu", threads=spec.threads)
        wanted.append(spec.device)
        engine.device = spec.device.replace("auto", "cuda")
        management.gpus[gpu] = (57 * GIB, 23 * GIB)
        return engine

    def open_context(name: str) -> str:
        opened.append(name)
        management.gpus[gpu] = (59 * GIB, 21 * GIB)
        return name

    monkeypatch.setattr(loader, "open_engine", open_engine)
    monkeypatch.setattr(placement, "open_device", open_context)
    monkeypatch.setattr(load_spec, "uses_cuda", lambda *_: True)
    path = onnx_models.affine(tmp_path)
    with (
        ingot.serve(path, http_port=0, grpc_port=0, threads=1, isolate="auto" if usable else "all") as server,
        httpx.Client(base_url=server.http_url, trust_env=False) as http,
    ):
        properties = http.get("/v2/models/affine").json().get("properties", {})
        metrics = http.get("/metrics").text
    assert wanted == (["auto:1"] if usable else [])
    assert "model affine: placed on cuda:1" in caplog.text
    assert opened == (["cuda:1"] if usable else [])
    lines = [line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#")]
    shown = {
        name: float(value) for name, _, value in lines if name.startswith(("ingot_model_dev", "ingot_gpu_context"))
    }
    labels = 'device="cuda:1",kind="{}",model="affine",version="1"'
    assert shown == (
        {
            f"ingot_model_device_memory_bytes{{{labels.format('planned')}}}": path.stat().st_size,
            f"ingot_model_device_memory_bytes{{{labels.format('measured')}}}": 2 * GIB,
            'ingot_gpu_context_bytes{device="cuda:1"}': GIB,
        }
        if usable
        else {}
    )
    assert ("cuda:1 (60 GiB free, 0% busy)" in properties["placement"]) == usable
    fallback = "on the CPU: placed on cuda:1, which its engine process could not use"
    assert (fallback in properties["placement"]) == (fallback in caplog.text) == (not usable)
    assert ('ingot_model_cpu_fallback{model="affine",version="1"} 1' in metrics) == (not usable)
