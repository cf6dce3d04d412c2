"""Triton's example repository as a user moves it: import, serve, and call it by unchanged code with tritonclient."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import ingot
from ingot import RunningServer
from ingot.model_store import Store
from ingot.tensors import Array
from tests.server.interop import triton_models
from tests.support import run_in_process, succeeded

DATATYPES = {"int32": "INT32", "float32": "FP32", "object": "BYTES"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def notes(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The notes of each model's import."""
    folder = triton_models.repository(tmp_path_factory.mktemp("repository"))
    found = json.loads(succeeded(run_in_process(["import", str(folder), "--json"], folder, home)))
    assert not found["failed"]
    return {model["reference"].partition(":")[0]: model["notes"] for model in found["imported"]}


@pytest.fixture(scope="module")
def server(home: Path, notes: dict[str, list[str]]) -> Iterator[RunningServer]:
    with ingot.serve(*(f"{name}:1" for name in notes), store=Store(home), http_port=0, grpc_port=0) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def triton(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    module: Any = getattr(tritonclient, request.param)
    url = server.http_url if request.param == "http" else server.grpc_url
    with module.InferenceServerClient(url.partition("://")[2]) as client:
        client.module = module
        yield client


def infer(triton: Any, model: str, inputs: dict[str, Array], classes: dict[str, int] | None = None, **more: Any) -> Any:
    made = []
    for name, array in inputs.items():
        made.append(triton.module.InferInput(name, list(array.shape), DATATYPES[array.dtype.name]))
        made[-1].set_data_from_numpy(array)
    wanted = [triton.module.InferRequestedOutput(name, class_count=count) for name, count in (classes or {}).items()]
    return triton.infer(model, made, outputs=wanted or None, **more)


@pytest.mark.matrix
def test_numbers_and_texts(triton: Any) -> None:
    first, second = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    found = infer(triton, "simple", {"INPUT0": first, "INPUT1": second})
    assert np.array_equal(found.as_numpy("OUTPUT0"), first + second)
    assert np.array_equal(found.as_numpy("OUTPUT1"), first - second)
    texts = {"INPUT0": first.astype(str).astype(object), "INPUT1": second.astype(str).astype(object)}
    found = infer(triton, "simple_string", texts)
    assert [int(text) for text in found.as_numpy("OUTPUT0")[0]] == (first + second)[0].tolist()
    same = np.array([["a", "bc"]], object)
    assert infer(triton, "simple_identity", {"INPUT0": same}).as_numpy("OUTPUT0").tolist() == [[b"a", b"bc"]]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["simple_sequence", "simple_dyna_sequence"])
def test_the_server_fills_in_the_controls_of_sequences(triton: Any, name: str) -> None:
    values, number = [11, 7, 5], (1 << 33) + 1007
    found = []
    for index, value in enumerate(values):
        x = np.array([[value]], np.int32)
        flags: Any = {"sequence_start": index == 0, "sequence_end": index == len(values) - 1}
        found.append(infer(triton, name, {"INPUT": x}, sequence_id=number, **flags).as_numpy("OUTPUT").tolist())
    last = 5 + 1007 if name == "simple_dyna_sequence" else 5  # the low-order bits, as in Triton
    assert found == [[[12]], [[7]], [[last]]]
    with pytest.raises(InferenceServerException, match="sequence_id"):
        infer(triton, name, {"INPUT": np.array([[1]], np.int32)})


def test_a_text_is_not_the_id_of_a_number(triton: Any) -> None:
    x = np.array([[1]], np.int32)
    first: Any = {"sequence_id": "call", "sequence_start": True, "sequence_end": True}
    assert infer(triton, "simple_sequence", {"INPUT": x}, **first).as_numpy("OUTPUT").tolist() == [[2]]
    with pytest.raises(InferenceServerException, match="sequence_id is a text"):
        infer(triton, "simple_dyna_sequence", {"INPUT": x}, **first)


def test_implicit_states_and_an_optional_input(triton: Any) -> None:
    x = np.array([[1, 2]], np.float32)
    for index in range(3):
        found = infer(triton, "accumulator", {"INPUT": x}, sequence_id=5, sequence_start=index == 0)
        assert found.as_numpy("OUTPUT").tolist() == ((index + 1) * x).tolist()
        assert found.as_numpy("SUM_OUT") is None
    names = [tensor["name"] for tensor in described(triton, "accumulator")["inputs"]]
    assert names == ["INPUT"]


@pytest.mark.parametrize(
    ("name", "shape", "tensors", "classes"),
    [
        ("densenet_onnx", (3, 32, 32), ("data_0", "fc6_1"), (1000,)),
        ("densenet_batch", (1, 3, 32, 32), ("data_0", "fc6_1"), (1, 1000)),
        ("inception_onnx", (2, 29, 29, 3), ("input", "InceptionV3/Predictions/Softmax"), (2, 1001)),
    ],
)
def test_images_have_the_declared_shapes_and_classes_their_names(
    triton: Any, name: str, shape: tuple[int, ...], tensors: tuple[str, str], classes: tuple[int, ...]
) -> None:
    image = np.ones(shape, np.float32)
    assert infer(triton, name, {tensors[0]: image}).as_numpy(tensors[1]).shape == classes
    found = infer(triton, name, {tensors[0]: image}, {tensors[1]: 1}).as_numpy(tensors[1])
    score, index, label = found.reshape(-1)[0].decode().split(":")
    assert float(score) > 0
    assert label == f"class {index}"
    metadata = described(triton, name)
    assert metadata["inputs"][0]["shape"][-3:] == list(shape[-3:])
    assert metadata["outputs"][0]["shape"][-1] == classes[-1]
    if triton.module is tritonclient.http:
        assert metadata["labels"][:2] == ["class 0", "class 1"]


def described(triton: Any, model: str) -> dict[str, Any]:
    if triton.module is tritonclient.http:
        return dict(triton.get_model_metadata(model))
    found: dict[str, Any] = triton.get_model_metadata(model, as_json=True)
    for tensor in (*found["inputs"], *found["outputs"]):
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    return found


def test_a_note_says_what_becomes_of_each_setting(notes: dict[str, list[str]], server: RunningServer) -> None:
    simple = "\n".join(notes["simple"])
    for text in (
        "dynamic_batching.preserve_ordering is not imported: responses to different requests come in any order",
        "dynamic_batching.priority_levels is not imported: a request's priority is any whole number from 1",
        "dynamic_batching.default_queue_policy.max_queue_size is not imported: see --max-queue",
        "dynamic_batching.default_queue_policy.timeout_action REJECT holds here",
        "instance_group is not imported: see --instances",
    ):
        assert text in simple
    sequence = "\n".join(notes["simple_dyna_sequence"])
    assert "the parameter 'execute_delay_ms' is not imported" in sequence
    assert "sequence_batching.max_sequence_idle_microseconds is not imported: see --sequence-timeout" in sequence
    assert "the optional input 'SCALE' has the value in the graph" in "\n".join(notes["accumulator"])
    for name in ("simple", "simple_sequence", "simple_dyna_sequence", "simple_string", "inception_onnx"):
        assert not [note for note in notes[name] if "without batching" in note]
