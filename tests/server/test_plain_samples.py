"""POST /models/NAME of models without declared steps: values in, objects by output out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

import ingot
from ingot.server.main import RunningServer
from tests import onnx_models

CODE = """
class Upper:
    def predict_one(self, text: str) -> str:
        return text.upper()

class Size:
    inputs = ["image:bytes[batch]"]
    outputs = ["size:int64[batch]", "copy:bytes[batch]"]

    def predict(self, batch):
        return {"size": [len(item) for item in batch["image"]], "copy": batch["image"]}

class Recognizer:
    inputs = ["audio:bytes[batch]"]
    outputs = ["text:str[batch]"]

    def predict_one(self, sample):
        return f"{len(sample['audio'])} bytes"

class Top:
    inputs = ["text:str[batch]", "top:int64[batch]", "weights:float32[batch,2]"]
    outputs = ["words:str[batch,k]", "sum:float32[batch]"]

    def predict_one(self, sample):
        words = sample["text"].split()[: sample["top"]]
        return {"words": words, "sum": sample["weights"].sum()}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("plain")
    file = folder / "plain_models.py"
    file.write_text(CODE)
    sources = [f"{file}:{name}" for name in ("Upper", "Size", "Recognizer", "Top")]
    with ingot.serve(*sources, str(onnx_models.affine(folder)), http_port=0, grpc_port=0, device="cpu") as opened:
        yield opened


def ask(server: RunningServer, model: str, **body: Any) -> tuple[int, Any]:
    found = httpx.post(f"{server.http_url}/models/{model}", trust_env=False, timeout=60, **body)
    return found.status_code, found.json()


SAMPLE = {"text": "a b c", "top": 2, "weights": [1, 0.5]}
WORDS = {"words": ["a", "b"], "sum": 1.5}
LINE = {"y": [3, 5, 7], "z": [-1, -2, -3]}


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        ("upper", {"inputs": "a"}, {"output": "A"}),
        ("upper:1", {"inputs": ["a", "b"]}, [{"output": "A"}, {"output": "B"}]),
        ("upper", {"inputs": {"text": "a"}}, {"output": "A"}),
        ("top", {"inputs": SAMPLE}, WORDS),
        ("top", {"inputs": [SAMPLE, SAMPLE]}, [WORDS, WORDS]),
        ("top", {"inputs": "a b c", "parameters": {"top": 2, "weights": [1, 0.5]}}, WORDS),
        ("top", {"inputs": ["a b c"], "parameters": {"top": 2, "weights": [1, 0.5]}}, [WORDS]),
        ("size", {"inputs": "é"}, {"size": 2, "copy": "é"}),
        ("affine", {"inputs": [1, 2, 3]}, {"y": [3, 5, 7], "z": [-1, -2, -3]}),
        (
            "affine",
            {"inputs": [[1, 2, 3], [0, 0, 0]]},
            [{"y": [3, 5, 7], "z": [-1, -2, -3]}, {"y": [1, 1, 1], "z": [0, 0, 0]}],
        ),
    ],
)
def test_a_sample_is_answered_by_name(server: RunningServer, model: str, body: dict[str, Any], expected: Any) -> None:
    assert ask(server, model, json=body) == (200, expected)


def test_a_body_that_is_a_file_is_the_only_input(server: RunningServer) -> None:
    headers = {"content-type": "application/octet-stream"}
    assert ask(server, "size", content=b"abc", headers=headers) == (200, {"size": 3, "copy": "abc"})
    status, found = ask(server, "size", content=b"\xff\xd8", headers=headers)
    assert status == 400
    assert "output 'copy' has bytes that are not UTF-8" in found["error"]
    assert ask(server, "affine", content=b"abc", headers=headers)[0] == 400


def test_hugging_faces_client_asks_it(server: RunningServer) -> None:
    client = InferenceClient(model=f"{server.http_url}/models/recognizer")
    assert client.automatic_speech_recognition(b"RIFF").text == "4 bytes"


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("upper", {}, "BYTES, but its data holds something other than text"),
        ("upper", {"inputs": []}, "'inputs' is an empty list"),
        ("upper", {"inputs": 3}, "BYTES, but its data holds something other than text"),
        ("upper", {"inputs": {"texts": "a"}}, "'inputs.texts' is not an input of the model, which has text"),
        ("upper", {"inputs": [{"text": "a"}, {"b": 1}]}, "'inputs[1].b' is not an input"),
        ("upper", {"inputs": [{"text": "a"}, "b"]}, "'inputs[1]' must be an object with text"),
        ("upper", {"inputs": "a", "parameters": {"top_k": 1}}, "'parameters.top_k' is not an input of the model"),
        ("upper", {"inputs": "a", "parameters": 1}, "'parameters' is 1; it must be an object"),
        ("upper", {"inputs": "a", "options": {}}, "'options' is not a field that this server knows"),
        ("upper", {"inputs": ["a"] * 2049}, "over the limit of 2048"),
        ("top", {"inputs": "a"}, "'inputs' must be an object with text, top, weights"),
        ("top", {"inputs": {"text": "a"}}, "'inputs' must be an object with text, top, weights"),
        ("affine", {"inputs": [[1, 2, 3], [1]]}, "ragged"),
        ("affine", {"inputs": [1, 2]}, "input 'x'"),
    ],
)
def test_a_wrong_body_is_refused_by_field(server: RunningServer, model: str, body: Any, message: str) -> None:
    status, found = ask(server, model, json=body)
    assert status == 400, found
    assert message in found["error"]


def test_apis_for_texts_name_the_path_that_answers(server: RunningServer) -> None:
    found = httpx.post(f"{server.http_url}/models/upper/embed", json={"inputs": "a"}, trust_env=False)
    assert "declares no steps for texts; ask POST /models/upper" in found.json()["error"]
