"""The optional engine OpenVINO, by itself and behind the server."""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import Client
from ingot.demo import Data, Digits
from ingot.errors import InternalError, InvalidArgument, Unsupported
from ingot.model_store import Archive
from ingot.runtime import Engine, EngineSpec, Settings, load_engine
from ingot.runtime.loading.choice import obstacle
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.runtime.variants import RIGHT, Made, X, archive
from tests.server.samples import sample
from tests.support import run_python

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
OPENVINO = {"engine": "openvino"}
WIDE = (DType.UINT32, DType.UINT64, DType.INT64)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("openvino") is None:
        if os.environ.get("INGOT_REQUIRE_TOOLS") == "1":
            pytest.fail("the package 'openvino' is not installed")
        pytest.skip("the package 'openvino' is not installed")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)


def load(path: Path, **options: Any) -> Engine:
    return load_engine(EngineSpec(path, engine="openvino", **options))


class TestWhatItTakesAndGives:
    @pytest.mark.parametrize(
        "dtype", [item for item in DType if item not in (DType.FP64, DType.BYTES)], ids=lambda dtype: dtype.value
    )
    def test_numbers_come_back_as_they_went(self, tmp_path: Path, dtype: DType) -> None:
        engine = load(onnx_models.identity(tmp_path, dtype))
        assert engine.signature.inputs[0].dtype is dtype
        array = sample(dtype)
        if dtype in WIDE:
            array = np.clip(array, 0, 2**31 - 1)
        result = engine.run({"x": array})["y"]
        assert result.dtype == array.dtype
        assert result.tolist() == array.tolist()

    @pytest.mark.parametrize("dtype", [DType.FP64, DType.BYTES], ids=lambda dtype: dtype.value)
    def test_unsupported_datatypes_are_refused(self, tmp_path: Path, dtype: DType) -> None:
        with pytest.raises(Unsupported, match="'x' holds values of type"):
            load(onnx_models.identity(tmp_path, dtype))

    @pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: dtype.value)
    def test_integers_that_would_wrap_around_are_refused(self, tmp_path: Path, dtype: DType) -> None:
        engine = load(onnx_models.identity(tmp_path, dtype))
        with pytest.raises(InvalidArgument, match="input 'x' holds values beyond 32 bits"):
            engine.run({"x": np.full((1, 2), 2**31, dtype.numpy)})

    def test_names_are_those_of_the_file_where_values_have_several(self, tmp_path: Path) -> None:
        kind, shape = TensorProto.FLOAT, ("batch", 2)
        nodes = [
            helper.make_node("Relu", ["x"], ["y"]),
            helper.make_node("Identity", ["y"], ["same"]),
            helper.make_node("Identity", ["x"], ["given"]),
        ]
        outputs = [(name, kind, shape) for name in ("same", "y", "given")]
        path = onnx_models.save(tmp_path / "names", nodes, [("x", kind, shape), ("unused", kind, shape)], outputs)
        engine = load(path)
        assert [spec.name for spec in engine.signature.inputs] == ["x", "unused"]
        assert [spec.name for spec in engine.signature.outputs] == ["same", "y", "given"]
        x = np.array([[-1, 2]], np.float32)
        answer = engine.run({"x": x, "unused": x})
        assert {name: value.tolist() for name, value in answer.items()} == {
            "same": [[0, 2]],
            "y": [[0, 2]],
            "given": [[-1, 2]],
        }

    def test_dynamic_dimensions_have_distinct_names(self, tmp_path: Path) -> None:
        signature = load(onnx_models.pair(tmp_path)).signature
        assert signature.inputs[0].shape == ("a_0", "a_1")
        assert signature.outputs[0].wire_shape == [-1, -1]
        assert signature.batch is None

    def test_batches_of_all_sizes_in_turn(self, tmp_path: Path) -> None:
        engine = load(onnx_models.affine(tmp_path))
        for samples in (*range(1, 34), 2, 1):
            x = RNG.standard_normal((samples, 3)).astype(np.float32)
            answer = engine.run({"x": x})
            assert np.allclose(answer["y"], 2 * x + 1)
            assert np.array_equal(answer["z"], -x)

    def test_sequences_of_all_lengths(self, tmp_path: Path) -> None:
        engine = load(onnx_models.embedding(tmp_path))
        table = np.arange(20, dtype=np.float32).reshape(10, 2)
        for samples, length in ((1, 5), (3, 2), (1, 1), (2, 7)):
            ids = RNG.integers(0, 10, (samples, length))
            assert np.array_equal(engine.run({"ids": ids})["y"], table[ids])

    def test_an_answer_outlives_the_next_call_and_the_engine(self, tmp_path: Path) -> None:
        engine = load(onnx_models.affine(tmp_path))
        first, second = (engine.run({"x": np.full((1, 3), value, np.float32)})["y"] for value in (1, 5))
        engine.close()
        assert (first.tolist(), second.tolist()) == ([[3] * 3], [[11] * 3])

    def test_views_on_the_bytes_of_a_request(self, tmp_path: Path) -> None:
        """They cannot be written to, and may start at any byte."""
        raw = b"!" + np.arange(6, dtype=np.float32).tobytes()
        x = np.frombuffer(memoryview(raw)[1:], np.float32).reshape(2, 3)
        answer = load(onnx_models.affine(tmp_path)).run({"x": x})
        assert answer["y"].tolist() == [[1, 3, 5], [7, 9, 11]]


class TestPrecision:
    def test_floats_are_not_rounded_to_bfloat16(self, tmp_path: Path) -> None:
        weight = RNG.standard_normal((256, 256)).astype(np.float32)
        x = RNG.standard_normal((4, 256)).astype(np.float32)
        node = helper.make_node("MatMul", ["x", "weight"], ["y"])
        answer = load(product(tmp_path, [node], [numpy_helper.from_array(weight, "weight")])).run({"x": x})["y"]
        assert np.allclose(answer, x @ weight, atol=1e-3)

    def test_compressed_weights_do_not_make_the_inputs_int8(self, tmp_path: Path) -> None:
        weight, scale = RNG.integers(-127, 128, (256, 256)).astype(np.int8), np.full(256, 0.01, np.float32)
        x = RNG.standard_normal((4, 256)).astype(np.float32)
        constants = [numpy_helper.from_array(item, name) for name, item in (("weight", weight), ("scale", scale))]
        nodes = [
            helper.make_node("DequantizeLinear", ["weight", "scale"], ["float"], axis=1),
            helper.make_node("MatMul", ["x", "float"], ["y"]),
        ]
        answer = load(product(tmp_path, nodes, constants)).run({"x": x})["y"]
        assert np.allclose(answer, x @ (weight * scale), atol=1e-3)

    @pytest.mark.matrix
    def test_int8_convolutions_answer_as_those_of_onnx_runtime(
        self, digits: tuple[Digits, Data, Data], digits_archive: Path
    ) -> None:
        path = Archive.open(digits_archive).unpacked()  # its folder goes with it
        graph = path.variant("int8").path()
        images = {"image": digits[2].images[:200]}
        mine, theirs = (
            load_engine(EngineSpec(graph, device="cpu", engine=name)) for name in ("openvino", "onnxruntime")
        )
        answer, expected = mine.run(images)["logits"], theirs.run(images)["logits"]
        assert (answer.argmax(1) == expected.argmax(1)).mean() > 0.98
        assert np.abs(answer - expected).mean() < 0.02 * np.abs(expected).mean()


def product(folder: Path, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]) -> Path:
    kind, shape = TensorProto.FLOAT, ("batch", 256)
    return onnx_models.save(folder / "product.onnx", nodes, [("x", kind, shape)], [("y", kind, shape)], constants)


class TestFailures:
    def test_files_that_cannot_be_loaded(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(InvalidArgument, match="no model file"):
            load(tmp_path / "none")
        (tmp_path / "text").write_text("hello")
        with pytest.raises(InvalidArgument, match=r"^OpenVINO cannot load text: Model can't be parsed$"):
            load(tmp_path / "text")
        unknown = onnx_models.save(
            tmp_path / "unknown",
            [helper.make_node("Nope", ["x"], ["y"])],
            [("x", TensorProto.FLOAT, (1,))],
            [("y", TensorProto.FLOAT, (1,))],
        )
        with pytest.raises(InvalidArgument, match="No conversion rule found for operations: Nope"):
            load(unknown)
        assert capfd.readouterr() == ("", "")

    def test_inputs_that_do_not_fit_each_other(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        engine = load(onnx_models.pair(tmp_path))
        with pytest.raises(InternalError, match="the engine failed on this input"):
            engine.run({"a": np.ones((1, 2), np.float32), "b": np.ones((1, 3), np.float32)})
        a = np.ones((2, 2), np.float32)
        assert engine.run({"a": a, "b": a})["y"].tolist() == [[2, 2], [2, 2]]  # it still runs
        assert capfd.readouterr() == ("", "")

    def test_devices_and_engines_that_there_are_not(self, tmp_path: Path) -> None:
        path = onnx_models.affine(tmp_path)
        with pytest.raises(InvalidArgument, match="auto, cpu or cuda"):
            load(path, device="tpu")
        with pytest.raises(Unsupported, match="OpenVINO runs models on the CPU"):
            load(path, device="cuda")
        with pytest.raises(Unsupported, match="'tensorflow'; there are onnxruntime, openvino"):
            load_engine(EngineSpec(path, engine="tensorflow"))

    @pytest.mark.usefixtures("missing")
    def test_it_is_not_installed(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match=r"pip install 'ingot-serve\[openvino\]'"):
            load(onnx_models.affine(tmp_path))


def test_external_weights(tmp_path: Path) -> None:
    path = onnx_models.slow(tmp_path, repeats=1)
    whole = load(path)
    other = tmp_path / "split" / "graph"
    other.parent.mkdir()
    onnx.save(onnx.load(path), other, save_as_external_data=True, location="0123abcd", size_threshold=0)
    x = RNG.standard_normal((2, 1024)).astype(np.float32)
    assert np.array_equal(load(other).run({"x": x})["y"], whole.run({"x": x})["y"])


def test_custom_operators_are_served(tmp_path: Path) -> None:
    """They are functions of the file, which OpenVINO does not know. The large weight is in another file."""
    kind, shape, opsets = (
        TensorProto.FLOAT,
        ("batch", 32),
        [helper.make_opsetid("", 18), helper.make_opsetid("ours", 1)],
    )
    square = helper.make_node("Mul", ["a", "a"], ["b"])
    weight = RNG.standard_normal((32, 32)).astype(np.float32)
    nodes = [helper.make_node("Square", ["x"], ["s"], domain="ours"), helper.make_node("MatMul", ["s", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, shape)],
        [numpy_helper.from_array(weight, "w")],
    )
    functions = [helper.make_function("ours", "Square", ["a"], ["b"], [square], opsets[:1])]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    path = tmp_path / "square.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    x = RNG.standard_normal((2, 32)).astype(np.float32)
    with ingot.serve(f"square={path}", engine="openvino", **FREE) as server, Client(server.http_url) as client:
        assert client.metadata("square")["platform"] == "openvino_onnx"
        assert np.allclose(client.infer("square", {"x": x})["y"], x**2 @ weight, atol=1e-4)


def test_inlining_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    values = [(name, TensorProto.FLOAT, (1,)) for name in "xy"]
    model = onnx.load(onnx_models.save(tmp_path / "model", nodes, values[:1], values[1:]))
    model.functions.append(helper.make_function("ours", "F", ["x"], ["y"], nodes, model.opset_import))
    path = tmp_path / "functions.onnx"
    onnx.save(model, path)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(Unsupported, match="needs the package 'onnx-ir', which is not installed: pip install onnx-ir"):
        load(path)


def test_weights_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model" / "graph"
    path.parent.mkdir()
    onnx.save(onnx.load(onnx_models.slow(tmp_path, repeats=1)), path, save_as_external_data=True, location="weight")
    (path.parent / "weight").rename(tmp_path / "weight")
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../weight"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidArgument, match="outside the base directory"):
        load(path)


def test_two_engines_at_once(tmp_path: Path) -> None:
    path = onnx_models.slow(tmp_path, repeats=4)
    inputs = [RNG.standard_normal((samples, 1024)).astype(np.float32) for samples in (1, 3)]
    engines = [load(path, threads=1) for _ in inputs]
    expected = [engine.run({"x": x})["y"] for engine, x in zip(engines, inputs, strict=True)]

    def ask(index: int) -> list[Array]:
        return [engines[index].run({"x": inputs[index]})["y"] for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        for index, answers in enumerate(pool.map(ask, range(2))):
            assert all(np.array_equal(answer, expected[index]) for answer in answers)


@pytest.mark.matrix
def test_it_is_imported_when_used_and_reports_nothing_to_its_maker(tmp_path: Path) -> None:
    code = "import sys, pathlib, ingot.server.main, ingot.quant\n"
    code += "from ingot.runtime import EngineSpec, load_engine\n"
    code += "print('openvino' in sys.modules)\n"
    code += f"load_engine(EngineSpec(pathlib.Path({str(onnx_models.affine(tmp_path))!r}), engine='openvino'))\n"
    code += "print([name for name in sys.modules if name.startswith('openvino_telemetry')], 'torch' in sys.modules)"
    assert run_python(code).split("\n") == ["False", "[] False", ""]


class TestArchives:
    @pytest.mark.matrix
    def test_a_variant_made_for_it_is_served_by_it(self) -> None:
        made = archive([Made("fp32", 60), Made("int8", 1, requires=OPENVINO)])
        with ingot.serve(made, instances=2, choice_time=0.05, **FREE) as server:
            for url in (server.http_url, server.grpc_url):
                with Client(url) as client, ThreadPoolExecutor(4) as pool:
                    told = client.metadata("double")
                    assert (told["platform"], told["properties"]["variant"]) == ("openvino_onnx", "int8")
                    answers = pool.map(lambda samples: (samples, ask(client, samples)), range(1, 20))
                    assert all(np.allclose(answer, 2 * X.repeat(samples, 0)) for samples, answer in answers)

    @pytest.mark.usefixtures("missing")
    def test_where_it_is_missing_another_is_served(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        made = archive([Made("int8", 1, requires=OPENVINO), Made("fp32", 2)])
        caplog.set_level("INFO", "ingot.runtime.loading.choice")
        with ingot.serve(made, **FREE) as server, Client(server.http_url) as client:
            told = client.metadata("double")
        assert (told["platform"], told["properties"]["variant"]) == ("onnxruntime_onnx", "fp32")
        assert "left out: int8: it would run in OpenVINO, which is not installed: pip install" in caplog.text
        path = tmp_path / "double.ingot"
        made.save(path)
        with pytest.raises(
            Unsupported, match=r"'openvino', which is not installed: pip install 'ingot-serve\[openvino\]'"
        ):
            ingot.serve(f"{path}#int8", **FREE)
        with pytest.raises(Unsupported, match=r"#int8 cannot be run here: .* pip install 'ingot-serve\[openvino\]'"):
            ingot.compare(f"{path}#fp32", f"{path}#int8")

    def test_obstacles_of_a_variant(self) -> None:
        (variant,) = archive([Made("int8", requires=OPENVINO)]).variants
        assert obstacle(variant, Settings(device="cpu")) == obstacle(variant, Settings(device="auto")) == ""
        assert "the device is 'cuda'" in obstacle(variant, Settings(device="cuda"))
        (variant,) = archive([Made("int8", requires={"engine": "tensorflow"})]).variants
        assert "the engine 'tensorflow', which this version does not have" in obstacle(variant, Settings(device="cpu"))

    @pytest.mark.matrix
    def test_it_is_compared_as_it_is_served(self) -> None:
        made = archive([Made("fp32", 2), Made("int8", 1, requires=OPENVINO)])
        result = ingot.compare(made.variant("fp32"), made.variant("int8"), {"x": RIGHT.inputs["x"]}, batches=(1,))
        assert result.score_after is not None
        assert result.score_after.value == pytest.approx(1)
        assert set(result.versions) >= {"onnxruntime", "openvino"}


def ask(client: Client, samples: int) -> Array:
    return client.infer("double", {"x": X.repeat(samples, 0)})["y"]
