"""The APIs of other servers, on models with steps: answers as those servers give them, and errors in their forms."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.model_store import Archive, Golden
from ingot.steps import Described, embedding, text_ranking
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.server import test_steps
from tests.server.access.served import make_key
from tests.steps.bert import tokenizer_file, vocabulary

SHAPE = ("batch", "seq")
IDS, MASK, TYPES = (TensorSpec(name, DType.INT64, SHAPE) for name in ("input_ids", "attention_mask", "token_type_ids"))
LONG = "a" * 100_001
TABLE = np.random.default_rng(0).standard_normal((len(vocabulary()), 4)).astype(np.float32)


def archive(
    name: str,
    described: Described,
    inputs: tuple[TensorSpec, ...],
    output: TensorSpec | tuple[TensorSpec, ...],
    graph: bytes,
    goldens: Sequence[Golden] = (),
) -> Archive:
    """Return an archive of a graph with steps."""
    signature = Signature(inputs, output if isinstance(output, tuple) else (output,), "batch", {"seq": Range(1, 16)})
    padding = {"seq": Padding({spec.name: 0 for spec in inputs})}
    return archive_of(name, graph, signature, goldens, described.files, padding=padding, steps=described.steps)


def table(folder: Path) -> Archive:
    """The mean of a vector of each token."""
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["seen"]),
        helper.make_node("Gather", ["table", "seen"], ["last_hidden_state"]),
    ]
    output = TensorSpec("last_hidden_state", DType.FP32, ("batch", "seq", 4))
    graph = onnx_models.save(
        folder / "table.onnx",
        nodes,
        [(spec.name, TensorProto.INT64, SHAPE) for spec in (IDS, MASK)],
        [(output.name, TensorProto.FLOAT, output.shape)],
        [numpy_helper.from_array(TABLE, "table")],
    )
    described = embedding(tokenizer_file(), 4, max_length=16, prompts={"query": "a fine ", "document": ""})
    inputs = {"input_ids": np.array([[1, 2, 3]]), "attention_mask": np.ones((1, 3), np.int64)}
    golden = Golden(inputs, {"last_hidden_state": TABLE[inputs["input_ids"]]})
    return archive("table", described, (IDS, MASK), output, graph.read_bytes(), [golden])


def ranker(folder: Path) -> Archive:
    """logits = tokens of the second text, less 4: a longer document is better."""
    nodes = [
        helper.make_node("Mul", ["attention_mask", "token_type_ids"], ["second"]),
        helper.make_node("ReduceSum", ["second", "axes"], ["count"], keepdims=1),
        helper.make_node("Cast", ["count"], ["many"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["many", "four"], ["logits"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([1]), "axes"),
        numpy_helper.from_array(np.array(4, np.float32), "four"),
    ]
    inputs = [(spec.name, TensorProto.INT64, SHAPE) for spec in (MASK, TYPES)]
    output = TensorSpec("logits", DType.FP32, ("batch", 1))
    graph = onnx_models.save(
        folder / "ranker.onnx", nodes, inputs, [(output.name, TensorProto.FLOAT, output.shape)], constants
    )
    described = text_ranking(tokenizer_file(), max_length=16, text="question")  # the APIs find the input's name
    return archive("ranker", described, (MASK, TYPES), output, graph.read_bytes())


def mean(*words: str) -> Array:
    """The embedding of a text of known words."""
    ids = [vocabulary().index(word) for word in ("[CLS]", *words, "[SEP]")]
    found: Array = TABLE[ids].mean(0)
    return found


def cosine(one: Array, other: Array) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("apis")
    models = {"table": table(folder), "ranker": ranker(folder), "length": test_steps.make(folder)}
    for name, made in models.items():
        made.save(folder / f"{name}.ingot")
    with ingot.serve(*(str(folder / f"{name}.ingot") for name in models), http_port=0, grpc_port=0) as running:
        yield running


def post(server: RunningServer, path: str, **content: Any) -> httpx.Response:
    return httpx.post(f"{server.http_url}{path}", json=content, trust_env=False, timeout=60)


class TestOpenAI:
    def test_texts_are_embedded(self, server: RunningServer) -> None:
        found = post(server, "/v1/embeddings", model="table", input=["a film", "good"]).json()
        assert (found["object"], found["model"]) == ("list", "table")
        assert [(item["object"], item["index"]) for item in found["data"]] == [("embedding", 0), ("embedding", 1)]
        np.testing.assert_allclose(found["data"][0]["embedding"], mean("a", "film"), atol=1e-6)
        np.testing.assert_allclose(found["data"][1]["embedding"], mean("good"), atol=1e-6)
        assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}

    def test_base64_has_the_same_numbers(self, server: RunningServer) -> None:
        asked = {"model": "table", "input": "a film"}
        numbers = post(server, "/v1/embeddings", **asked).json()["data"][0]["embedding"]
        encoded = post(server, "/v1/embeddings", **asked, encoding_format="base64", user="u").json()["data"][0]
        assert np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4").tolist() == pytest.approx(numbers)

    def test_fewer_dimensions_have_the_length_1_again(self, server: RunningServer) -> None:
        found = post(server, "/v1/embeddings", model="table:1", input="good", dimensions=2).json()
        expected = mean("good")[:2] / np.linalg.norm(mean("good")[:2])
        np.testing.assert_allclose(found["data"][0]["embedding"], expected, atol=1e-6)

    def test_a_prompt_comes_before_the_text(self, server: RunningServer) -> None:
        found = post(server, "/v1/embeddings", model="table", input="film", prompt_name="query").json()
        np.testing.assert_allclose(found["data"][0]["embedding"], mean("a", "fine", "film"), atol=1e-6)

    def test_models_are_listed(self, server: RunningServer) -> None:
        listed = httpx.get(f"{server.http_url}/v1/models", trust_env=False).json()
        assert [item["id"] for item in listed["data"]] == ["table", "ranker", "length"]
        for name in ("table", "table:1"):
            one = httpx.get(f"{server.http_url}/v1/models/{name}", trust_env=False)
            assert one.json() == {"id": name, "object": "model", "created": 0, "owned_by": "ingot"}

    @pytest.mark.parametrize(
        ("content", "status", "field", "part"),
        [
            ({"input": [[1, 2]]}, 400, "input", "check_embedding_ctx_length=False"),
            ({"input": [1, 2]}, 400, "input", "check_embedding_ctx_length=False"),
            ({"input": []}, 400, "input", "empty list"),
            ({"input": ["a", ""]}, 400, "input", "empty text at index 1"),
            ({"input": {"a": 1}}, 400, "input", "a text or a list of texts"),
            ({}, 400, "input", "is missing"),
            ({"input": "a", "dimensions": 5}, 400, "dimensions", "have 4"),
            ({"input": "a", "dimensions": 0}, 400, "dimensions", "1 or more"),
            ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "float, base64"),
            (
                {"input": "a", "prompt_name": "x"},
                400,
                "prompt_name",
                "'prompt_name' is 'x'; the model's prompts are: query",
            ),
            ({"input": LONG}, 400, "input", "'input' has 100001 characters"),
            ({"input": ["a", LONG]}, 400, "input[1]", "'input[1]' has 100001 characters"),
            ({"input": ["a" * 90_000] * 30}, 400, "input", "'input' has 2700000 characters in all"),
            ({"input": "a", "truncate": True}, 400, "truncate", "leave it out"),
            ({"input": "a", "model": "length"}, 400, "model", "text-classification"),
            ({"input": "a", "model": "none"}, 404, None, "this server has: table"),
            ({"input": "a", "model": None}, 400, "model", "is missing"),
            ({"input": ["a"] * 2049}, 400, "input", "over the limit of 2048"),
        ],
    )
    def test_errors_name_the_field(
        self, server: RunningServer, content: dict[str, Any], status: int, field: str | None, part: str
    ) -> None:
        answer = post(server, "/v1/embeddings", **{"model": "table", **content})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert part in error["message"]
        assert error["param"] == field
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")

    def test_a_body_that_is_too_large_is_refused_in_the_same_form(self, server: RunningServer) -> None:
        answer = post(server, "/v1/embeddings", model="table", input="a" * (200 << 20))
        assert answer.status_code == 413
        assert "--max-body-mb" in answer.json()["error"]["message"]


class TestTextEmbeddingsInference:
    def test_texts_are_embedded(self, server: RunningServer) -> None:
        for path in ("/embed", "/models/table/embed"):
            found = post(server, path, inputs=["a film", "good"]).json()
            np.testing.assert_allclose(found, [mean("a", "film"), mean("good")], atol=1e-6)
        normal = post(server, "/embed", inputs="good", normalize=True, dimensions=4).json()
        np.testing.assert_allclose(normal, [mean("good") / np.linalg.norm(mean("good"))], atol=1e-6)

    def test_texts_are_compared(self, server: RunningServer) -> None:
        found = post(server, "/similarity", inputs={"source_sentence": "good", "sentences": ["bad", "good"]}).json()
        assert found == pytest.approx([cosine(mean("good"), mean("bad")), 1.0], abs=1e-6)

    def test_texts_are_classified(self, server: RunningServer) -> None:
        one = post(server, "/predict", inputs="a fine film").json()
        assert [item["label"] for item in one] == ["LONG", "SHORT"]
        assert sum(item["score"] for item in one) == pytest.approx(1)
        many = post(server, "/models/length/predict", inputs=[["a fine film"], ["good"]]).json()
        assert [[item["label"] for item in items] for items in many] == [["LONG", "SHORT"], ["SHORT", "LONG"]]
        raw = post(server, "/predict", inputs="a fine film", raw_scores=True).json()
        assert [item["score"] for item in raw] == [5, 4.5]
        pair = post(server, "/predict", inputs=["good", "film"]).json()
        assert [item["label"] for item in pair] == ["LONG", "SHORT"]

    def test_the_model_is_described(self, server: RunningServer) -> None:
        found = httpx.get(f"{server.http_url}/models/length/info", trust_env=False).json()
        assert found["model_type"]["classifier"]["id2label"] == {"0": "LONG", "1": "SHORT"}
        assert (found["max_input_length"], found["auto_truncate"]) == (16, True)
        assert found["model_sha"].startswith("sha256:")
        several = httpx.get(f"{server.http_url}/info", trust_env=False)
        assert (several.status_code, several.json()["error_type"]) == (404, "Backend")
        assert "/models/length, /models/ranker, /models/table" in several.json()["error"]

    @pytest.mark.parametrize(
        ("path", "content", "part"),
        [
            ("/embed", {"inputs": "a " * 30, "truncate": False}, "'inputs' has 16 tokens too many"),
            ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "cuts texts on the right"),
            ("/embed", {"inputs": "a", "normalise": True}, "'normalise' is not a field"),
            ("/predict", {"inputs": ["a", "b", "c"]}, "list of lists"),
            ("/predict", {"inputs": [["a"], ["a", "b"]]}, "mixes texts and pairs"),
            ("/predict", {"inputs": [["a", "b", "c"]]}, "over the limit of 2"),
            ("/predict", {"inputs": [["a"]] * 2049}, "has 2049 items, over the limit of 2048"),
            ("/models/table/embed", {"inputs": ["a"] * 2049}, "over the limit of 2048"),
            ("/embed", {"inputs": ["a", LONG]}, "'inputs[1]' has 100001 characters"),
            ("/embed", {"inputs": "a", "prompt_name": "x"}, "'prompt_name' is 'x'"),
            ("/similarity", {"inputs": {"source_sentence": LONG, "sentences": ["a"]}}, "'inputs.source_sentence' has"),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}}, "'inputs.sentences[0]' has"),
            ("/predict", {"inputs": LONG}, "'inputs' has 100001"),
            ("/predict", {"inputs": ["a", LONG]}, "'inputs[1]' has"),
            ("/predict", {"inputs": [["a", "b"], [LONG, "b"]]}, "'inputs[1][0]' has"),
            ("/models/ranker/embed", {"inputs": "a"}, "whose task is text-ranking"),
        ],
    )
    def test_errors(self, server: RunningServer, path: str, content: dict[str, Any], part: str) -> None:
        answer = post(server, path, **content)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation"), answer.text
        assert part in answer.json()["error"]


class TestReranking:
    documents = ("good", "a very fine film", "bad film")
    # Tokens of a document and its end, less 4, as sigmoid.
    expected = (1, 1 / (1 + np.exp(-1.0)), 2), (2, 1 / (1 + np.exp(1.0)), 1), (0, 1 / (1 + np.exp(2.0)), 0)

    def test_texts(self, server: RunningServer) -> None:
        found = post(server, "/rerank", query="film", texts=self.documents, return_text=True).json()
        assert [item["index"] for item in found] == [1, 2, 0]
        assert [item["score"] for item in found] == pytest.approx([score for _, score, _ in self.expected], abs=1e-6)
        assert found[0]["text"] == "a very fine film"

    @pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/models/ranker/rerank"])
    def test_documents(self, server: RunningServer, path: str) -> None:
        documents = ["good", {"text": "a very fine film"}, "bad film"]
        found = post(server, path, model="ranker", query="film", documents=documents, top_n=2).json()
        assert [item["index"] for item in found["results"]] == [1, 2]
        assert found["results"][0].keys() == {"index", "relevance_score"}
        assert found["usage"]["total_tokens"] > 0
        assert found["meta"]["billed_units"]

    def test_errors(self, server: RunningServer) -> None:
        for content, part in (
            ({"documents": []}, "empty list"),
            ({"documents": [{"title": "a"}]}, "a text or a list of texts"),
            ({"texts": ["a"], "model": "ranker"}, "'model' is not a field"),
            ({"texts": ["a"], "documents": ["a"]}, "send one of them"),
            ({"documents": ["a"], "texts": None, "top_n": 0}, "'top_n' is 0"),
            ({"documents": ["a"], "model": "table"}, "sentence-similarity"),
            ({"documents": ["a"], "max_tokens_per_doc": 3}, "cuts pairs at 16"),
            ({"documents": ["a", LONG]}, "'documents[1]' has 100001"),
            ({"texts": ["a", LONG]}, "'texts[1]' has 100001"),
            ({"texts": ["a"], "query": LONG}, "'query' has 100001"),
            # Refused before the query is copied for each text: there would be gigabytes of them.
            ({"texts": ["a"] * 2000, "query": "a" * 4_000_000}, "'query' has 4000000"),
        ):
            answer = post(server, "/v1/rerank", **{"query": "film", **content})
            assert answer.status_code == 422, answer.text
            assert part in answer.json()["error"] == answer.json()["message"]


class TestHuggingFace:
    def test_each_task_has_its_form(self, server: RunningServer) -> None:
        [classes] = post(server, "/models/length", inputs="a fine film", parameters={"top_k": 1}).json()
        assert [item["label"] for item in classes] == ["LONG"]
        found = post(server, "/models/table", inputs="good", normalize=False).json()
        np.testing.assert_allclose(found, [mean("good")], atol=1e-6)
        found = post(server, "/models/table", inputs={"source_sentence": "good", "sentences": ["good"]}).json()
        assert found == pytest.approx([1.0])

    def test_errors(self, server: RunningServer) -> None:
        for path, content, status, part in (
            ("length", {"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, 400, "softmax, sigmoid, none"),
            ("length", {"inputs": "a", "parameters": {"topk": 1}}, 400, "parameters.topk"),
            ("length", {"inputs": ["a", LONG]}, 400, "'inputs[1]' has 100001"),
            ("ranker", {"inputs": "a"}, 400, "/models/ranker/rerank"),
            ("ranker/rerank", {"query": "a", "documents": ["a"], "model": "table"}, 422, "the path names 'ranker'"),
            ("table", {"inputs": "a", "parameters": {"inputs": "b"}}, 400, "parameters.inputs"),
            ("table", {"inputs": "a", "normalize": True, "parameters": {"normalize": None}}, 400, "also at the root"),
            ("none", {"inputs": "a"}, 404, "this server has"),
        ):
            answer = post(server, f"/models/{path}", **content)
            assert answer.status_code == status, answer.text
            assert part in answer.json()["error"]


class TestErrorsWithoutAnOperation:
    """Errors that no operation answers have the form of the API that the path belongs to."""

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/embeddings", 405),
            ("DELETE", "/v1/models/table", 405),
            ("GET", "/v1/files", 404),
            ("POST", "/v1/responses", 404),
            ("POST", "/v1/embeddings", 400),
        ],
    )
    def test_below_v1_as_openai(self, server: RunningServer, method: str, path: str, status: int) -> None:
        answer = httpx.request(method, f"{server.http_url}{path}", content=b"{", trust_env=False)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        assert error.keys() == {"message", "type", "param", "code"}
        assert path in error["message"] or status == 400

    def test_of_text_embeddings_inference_and_the_protocol(self, server: RunningServer) -> None:
        wrong = httpx.get(f"{server.http_url}/embed", trust_env=False)
        assert (wrong.status_code, wrong.json().keys()) == (405, {"error", "error_type"})
        assert wrong.headers["allow"] == "POST"
        assert wrong.json()["error"] == "GET /embed: Method Not Allowed; use POST"
        unknown = httpx.get(f"{server.http_url}/v2/nothing", trust_env=False)
        assert (unknown.status_code, unknown.json().keys()) == (404, {"error"})

    def test_of_access(self, server: RunningServer, tmp_path: Path) -> None:
        table(tmp_path).save(tmp_path / "table.ingot")
        keys = tmp_path / "keys.toml"
        make_key(keys, "infer")
        with ingot.serve(str(tmp_path / "table.ingot"), http_port=0, grpc_port=0, auth=keys) as running:
            refused = post(running, "/v1/embeddings", model="table", input="a")
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"

    def test_a_connection_stays_open_behind_an_error(self, server: RunningServer) -> None:
        wrong = b"GET /v1/models/none HTTP/1.1\r\nHost: localhost\r\n\r\n"
        body = b'{"model": "table"}'
        post = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        with socket.create_connection(("127.0.0.1", int(server.http_url.rpartition(":")[2])), 30) as connection:
            connection.sendall(wrong + post + wrong.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"404", b"400", b"404"]


def test_texts_of_all_lengths_in_one_request_get_the_vectors_that_each_gets_alone(server: RunningServer) -> None:
    words = ["a", "fine", "dull", "film", "was", "the"]
    texts = [" ".join(words[(row + place) % 6] for place in range(1 + 5 * row % 13)) for row in range(40)]
    together = post(server, "/v1/embeddings", model="table", input=texts).json()["data"]
    assert [item["index"] for item in together] == [*range(40)]
    for text, item in zip(texts, together, strict=True):
        assert np.allclose(item["embedding"], mean(*text.split()), atol=1e-6)
    alone = [post(server, "/v1/embeddings", model="table", input=text).json()["data"][0] for text in texts[:13]]
    for one, other in zip(alone, together, strict=False):
        assert np.allclose(one["embedding"], other["embedding"], atol=1e-6)


def test_the_waste_of_padding_within_requests_is_a_metric(server: RunningServer) -> None:
    """Five texts of 3 tokens and one of 15: of this graph, a call with padding costs less than another call."""
    counts = {kind: counted(server, kind) for kind in ("real", "padding")}
    texts = ["a", "a", "a", "a", "a", "a fine film was dull the a fine film was dull the a"]
    assert post(server, "/v1/embeddings", model="table", input=texts).status_code == 200
    real, padding = (counted(server, kind) - counts[kind] for kind in ("real", "padding"))
    assert real == 2 * (5 * 3 + 15)
    assert padding == 2 * 5 * 12


def counted(server: RunningServer, kind: str) -> float:
    found = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    name = f'ingot_padding_elements_total{{kind="{kind}",model="table",version="1"}} '
    return float(found.partition(name)[2].split()[0]) if name in found else 0.0
