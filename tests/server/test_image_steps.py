"""Pictures in, labels out: files of pictures over each protocol, which confined processes decode."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import Client, RunningServer
from ingot.errors import InvalidArgument
from ingot.model_store import Archive, Golden
from ingot.steps import image_classification
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.support import RunIngot, refused, run_python, succeeded

SIGNATURE = Signature(
    (TensorSpec("pixel_values", DType.FP32, ("batch", 3, 8, 8)),),
    (TensorSpec("logits", DType.FP32, ("batch", 3)),),
    "batch",
)
COLOURS = ["red", "green", "blue"]


def files(*colours: str) -> Array:
    """Return a file of each colour, in several formats."""
    array = np.empty(len(colours), object)
    for index, colour in enumerate(colours):
        pillow = pytest.importorskip("PIL.Image")
        file = BytesIO()
        pillow.new("RGB", (20, 31), colour).save(file, ("PNG", "JPEG", "WEBP")[index % 3])
        array[index] = file.getvalue()
    return array


def averages(folder: Path) -> bytes:
    """logits = the average of each channel."""
    nodes = [helper.make_node("ReduceMean", ["pixel_values", "axes"], ["logits"], keepdims=0)]
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    inputs = [("pixel_values", TensorProto.FLOAT, ("batch", 3, 8, 8))]
    outputs = [("logits", TensorProto.FLOAT, ("batch", 3))]
    return onnx_models.save(folder / "averages.onnx", nodes, inputs, outputs, [axes]).read_bytes()


def make(folder: Path, **options: Any) -> Archive:
    described = image_classification(COLOURS, size=8, mean=(0, 0, 0), std=(0.1, 0.1, 0.1), **options)
    opened = described.steps.open(lambda name: b"", SIGNATURE)
    raw = {"image": files("blue")}
    prepared = opened.prepare(raw)
    outputs = {"logits": prepared["pixel_values"].mean((2, 3))}
    golden = Golden(opened.tensors(prepared), outputs, raw, opened.finish(prepared, outputs))
    return archive_of("colour", averages(folder), SIGNATURE, [golden], {}, steps=described.steps)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make(folder).save(folder / "colour.ingot")
    return folder / "colour.ingot"


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with ingot.serve(str(path), http_port=0, grpc_port=0) as running:
        yield running


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_over_each_protocol(server: RunningServer, protocol: str) -> None:
    with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        found = client.infer("colour", {"image": files("blue", "red", "lime")})
        assert found["label"][:, 0].tolist() == [b"blue", b"red", b"green"]
        assert (found["score"][:, 0] > 0.99).all()
        pixels = client.infer("colour", {"pixel_values": np.ones((1, 3, 8, 8), np.float32)})
        assert pixels["logits"].tolist() == [[1, 1, 1]]
        with pytest.raises(InvalidArgument, match="element 1 of input 'image' is not a JPEG, PNG"):
            client.infer("colour", {"image": np.array([*files("red"), b"%PDF-1.7"], object)})


def test_json_has_base64(server: RunningServer) -> None:
    def ask(data: str) -> httpx.Response:
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [data]}
        return httpx.post(f"{server.http_url}/v2/models/colour/infer", json={"inputs": [tensor]}, trust_env=False)

    [red] = files("red")
    label, _ = ask(base64.b64encode(red).decode()).json()["outputs"]
    assert label["data"] == ["red", "green", "blue"]
    refused = ask("cat.jpg")
    assert refused.status_code == 400
    assert "element 0 of input 'image' is not a JPEG" in refused.json()["error"]


def test_the_command_sends_a_file(server: RunningServer, run_ingot: RunIngot, tmp_path: Path) -> None:
    [green] = files("lime")
    (tmp_path / "leaf.png").write_bytes(green)
    asked = run_ingot("infer", server.http_url, "colour", "--input", "image=@leaf.png")
    assert succeeded(asked).startswith("  green 1.000   ")
    assert "there is no readable file" in refused(
        run_ingot("infer", server.http_url, "colour", "--input", "image=@twig.png")
    )
    named = run_ingot("infer", server.http_url, "colour", "--input", "image=leaf.png")
    assert "write image=@leaf.png for the content of that file" in named.stderr


def test_time_is_counted_and_the_task_is_shown(server: RunningServer) -> None:
    server.infer("colour", {"image": files("red")})
    lines = httpx.get(f"{server.http_url}/metrics", trust_env=False).text.splitlines()
    [count] = [line for line in lines if line.startswith("ingot_step_seconds_count") and 'step="image"' in line]
    assert float(count.split()[1]) >= 1
    with Client(server.http_url) as client:
        properties = client.metadata("colour")["properties"]
    assert properties["task"] == "image-classification"
    assert properties["raw_inputs"] == "image:string[batch]"


@pytest.mark.matrix
def test_serving_needs_neither_torch_nor_transformers(path: Path) -> None:
    code = f"""
import sys, ingot
with ingot.serve({str(path)!r}, http_port=0, grpc_port=0) as running:
    running.infer("colour", {{"pixel_values": __import__("numpy").ones((1, 3, 8, 8), "float32")}})
print(sorted({{"torch", "transformers", "torchvision"}} & set(sys.modules)))
"""
    assert run_python(code).splitlines()[-1] == "[]"
