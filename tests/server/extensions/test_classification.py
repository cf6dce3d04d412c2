"""The extension classification: the best classes of an output instead of its values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from ingot.server.triton.outputs import best_classes
from ingot.tensors import DType
from tests import onnx_models
from tests.server.extensions.conftest import Triton, clients
from tests.server.interop.triton_models import network
from tests.support import RunIngot, succeeded


@pytest.fixture(scope="module")
def both(server: RunningServer) -> Iterator[dict[str, Triton]]:
    yield from clients(server)


@pytest.fixture
def triton(both: dict[str, Triton], protocol: str) -> Triton:
    return both[protocol]


def texts(answer: Any, name: str) -> Any:
    return np.vectorize(lambda item: item.decode() if isinstance(item, bytes) else item)(answer.as_numpy(name))


X = np.array([[0.5, 2, -1], [3, 3, 4]], np.float32)


def test_the_best_classes_come_in_order(triton: Triton) -> None:
    outputs = [triton.output("y", class_count=2), triton.output("z")]
    for _ in range(3):  # no request of this kind is remembered
        answer = triton.infer("affine", [triton.input("x", X)], outputs, request_id="7")
        assert texts(answer, "y").tolist() == [["5.000000:1", "2.000000:0"], ["9.000000:2", "7.000000:0"]]
        assert np.array_equal(answer.as_numpy("z"), -X)
    plain = triton.infer("affine", [triton.input("x", X)], [triton.output("y"), triton.output("z")])
    assert np.array_equal(plain.as_numpy("y"), 2 * X + 1)


def test_a_parameter_of_the_request_is_for_all_its_outputs(
    server: RunningServer, protocol: str, run_ingot: RunIngot
) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with ingot.Client(url) as client:
        for _ in range(3):  # the second may be a remembered request
            answer = client.infer("affine", {"x": X}, parameters={"classification": 1})
            assert answer["y"].tolist() == [[b"5.000000:1"], [b"9.000000:2"]]
            assert answer["z"].tolist() == [[b"1.000000:2"], [b"-3.000000:0"]]
            assert client.infer("affine", {"x": X}, parameters={"classification": 0})["y"].shape == X.shape
        for wrong in (-1, "two"):
            with pytest.raises(
                InvalidArgument, match=f"'classification' of the request is {wrong}; it must be a number"
            ):
                client.infer("affine", {"x": X}, parameters={"classification": wrong})
    options = ("--input", "x=[[1, 2, 4]]", "--output-name", "y", "--parameter", "classification=1")
    assert "9.000000:2" in succeeded(run_ingot("infer", url, "affine", *options))


def test_all_classes_if_there_are_fewer(triton: Triton) -> None:
    answer = triton.infer("affine", [triton.input("x", X)], [triton.output("y", class_count=9)])
    assert answer.as_numpy("y").shape == (2, 3)


def test_classes_in_json(both: dict[str, Triton]) -> None:
    triton = both["http"]
    wanted = [triton.output("y", class_count=1, binary_data=False)]
    answer = triton.infer("affine", [triton.input("x", X)], wanted)
    assert answer.get_output("y") == {
        "name": "y",
        "datatype": "BYTES",
        "shape": [2, 1],
        "data": ["5.000000:1", "9.000000:2"],
    }


def test_whole_numbers_and_a_model_without_batches(triton: Triton) -> None:
    numbers = np.array([[7, 9]], np.int64)
    answer = triton.infer("identity-int64", [triton.input("x", numbers, "INT64")], [triton.output("y", class_count=2)])
    assert texts(answer, "y").tolist() == [["9:1", "7:0"]]
    answer = triton.infer("unbatched", [triton.input("x", X[0])], [triton.output("y", class_count=1)])
    assert answer.as_numpy("y").shape == (1,)


def test_large_outputs_are_ordered_in_a_thread(triton: Triton) -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(1, -1)
    inputs = [triton.input("a", values), triton.input("b", values)]
    answer = triton.infer("pair", inputs, [triton.output("y", class_count=1)])
    assert texts(answer, "y").tolist() == [["119998.000000:59999"]]


@pytest.mark.parametrize(
    ("model", "array", "datatype", "classes", "says"),
    [
        ("identity-bytes", np.array([["a", "b"]], object), "BYTES", 1, "only numbers have classes"),
        ("identity-bool", np.array([[True, False]]), "BOOL", 1, "only numbers have classes"),
        ("identity-fp32", np.ones((40_000, 2), np.float32), "FP32", 2, "over the limit of 65536"),
        ("identity-fp32", np.ones((1, 2), np.float32), "FP32", -1, "must be a number of classes"),
    ],
)
def test_what_cannot_be_classified(
    triton: Triton, model: str, array: Any, datatype: str, classes: int, says: str
) -> None:
    with pytest.raises(InferenceServerException, match=says):
        triton.infer(model, [triton.input("x", array, datatype)], [triton.output("y", class_count=classes)])


def test_of_equal_values_the_first_comes_first_and_nan_comes_last() -> None:
    values = np.array([[1, np.nan, 2, 2, -np.inf, 2]], np.float32)
    found = [text.decode().partition(":")[2] for text in best_classes("y", values, 6, batched=True)[0]]
    assert found[:4] == ["2", "3", "5", "0"]
    assert set(found[4:]) == {"1", "4"}


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in (DType.BYTES, DType.BOOL)])
def test_every_number_has_classes(dtype: DType) -> None:
    values = np.array([3, 100, 7]).astype(dtype.numpy)
    text = "100.000000:1" if dtype.is_float else "100:1"
    assert best_classes("y", values, 1, batched=False).tolist() == [text.encode()]
    assert best_classes("y", np.zeros((0, 3), dtype.numpy), 1, batched=True).shape == (0, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.txt", "apple\r\np\u00eache\nplum\n"),
        ("index_to_name.json", '{"1": ["n2", "p\u00eache"], "0": ["n1", "apple"], "2": "plum"}'),
    ],
)
def test_labels_name_the_classes(tmp_path: Path, name: str, content: str) -> None:
    labels = tmp_path / name
    labels.write_bytes(content.encode())
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, http_port=0, grpc_port=0, labels=labels) as server:
        for both in clients(server):
            for triton in both.values():
                wanted = [triton.output("y", class_count=3)]
                found = texts(triton.infer("affine", [triton.input("x", X[:1])], wanted), "y")
                assert found.tolist() == [["5.000000:1:p\u00eache", "2.000000:0:apple", "-1.000000:2:plum"]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("labels.txt", None, "cannot be read"),
        ("labels.txt", b"\xff", "cannot be read"),
        ("labels.txt", bytes(5 << 20), "over 4 MiB"),
        ("labels.txt", b"apple\npeach\n", "are 2 names, and output 'y' has 3 classes"),
        ("labels.json", b"[", "cannot be read"),
        ("labels.json", b'{"0": "apple", "2": "plum"}', "an object with an entry for each index from 0"),
        ("labels.json", b'["apple", 3, "plum"]', "must be a list of names"),
        ("labels.json", b"7", "must be a list of names"),
        ("labels.json", b"[" * 100_000, "cannot be read"),
    ],
)
def test_files_that_are_not_labels(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    labels = tmp_path / name
    if content is not None:
        labels.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"the labels .*{says}"):
        ingot.serve(str(onnx_models.affine(tmp_path)), http_port=0, grpc_port=0, labels=labels)


@pytest.mark.matrix
def test_the_configuration_has_the_order_of_an_images_dimensions(tmp_path: Path) -> None:
    """Clients resize images by it; without certainty there is none."""
    orders = {(3, 8, 8): "FORMAT_NCHW", (8, 8, 1): "FORMAT_NHWC", (3, 8, 3): None, (8, 8, 8): None, (3, 8): None}
    made = [
        network(tmp_path, f"m{number}", ("input", TensorProto.FLOAT, ("batch", *dims)), "output")
        for number, dims in enumerate(orders)
    ]
    with ingot.serve(*map(str, made), http_port=0, grpc_port=0) as server:
        for both in clients(server):
            for number, order in enumerate(orders.values()):
                config = both["http"].client.get_model_config(f"m{number}")
                assert config["input"][0].get("format") == order
                assert "format" not in config["output"][0]
                over_grpc = both["grpc"].client.get_model_config(f"m{number}", as_json=True)["config"]
                assert over_grpc["input"][0].get("format") == order
