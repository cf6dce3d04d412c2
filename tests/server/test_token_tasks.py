"""Entities, answers, missing words and vectors of tokens, over each protocol and in the APIs of other servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import Client, RunningServer
from ingot.errors import InvalidArgument
from ingot.model_store import Archive
from ingot.steps import (
    Described,
    feature_extraction,
    fill_mask,
    question_answering,
    text_classification,
    token_classification,
)
from ingot.tensors import Array, DType, TensorSpec
from tests import onnx_models
from tests.server import test_apis
from tests.server.test_apis import IDS, MASK, SHAPE, TABLE, TYPES, mean, post
from tests.server.test_steps import texts
from tests.steps.bert import tokenizer_file, vocabulary
from tests.support import RunIngot, succeeded

WORDS = vocabulary()
LABELS = ["O", "B-PER", "I-PER", "B-LOC"]


def gather(folder: Path, name: str, described: Described, **tables: Array) -> Archive:
    """Return a model whose outputs are rows of tables for each token."""
    outputs, nodes = [], [helper.make_node("Mul", ["input_ids", "attention_mask"], ["seen"])]
    for output, table in tables.items():
        nodes.append(helper.make_node("Gather", [f"{output}.table", "seen"], [output]))
        outputs.append(TensorSpec(output, DType.FP32, ("batch", "seq", *table.shape[1:])))
    graph = onnx_models.save(
        folder / f"{name}.onnx",
        nodes,
        [(spec.name, TensorProto.INT64, SHAPE) for spec in (IDS, MASK)],
        [(spec.name, TensorProto.FLOAT, spec.shape) for spec in outputs],
        [numpy_helper.from_array(table, f"{output}.table") for output, table in tables.items()],
    )
    return test_apis.archive(name, described, (IDS, MASK), tuple(outputs), graph.read_bytes())


def scores(width: int, **words: int) -> Array:
    """Return a table of logits: 2 for the class of a word, and 0 else; other words have the class 0."""
    table = np.zeros((len(WORDS), width), np.float32)
    table[:, 0] = 2
    for word, index in words.items():
        table[WORDS.index(word)] = 0
        table[WORDS.index(word), index] = 2
    return table


def whole_tokenizer() -> bytes:
    """Return a tokenizer that knows its special tokens in texts, and joins words."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_str(tokenizer_file().decode())
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.decoder = tokenizers.decoders.WordPiece()
    return str(made.to_str()).encode()


def make(folder: Path) -> dict[str, Archive]:
    named = scores(4, we=1, fine=1, film=2, story=3)
    first, last = (np.zeros(len(WORDS), np.float32) for _ in range(2))
    first[WORDS.index("fine")] = last[WORDS.index("film")] = 9
    fits = np.zeros((len(WORDS), len(WORDS)), np.float32)
    fits[WORDS.index("[MASK]"), [WORDS.index("film"), WORDS.index("story")]] = 9, 8
    tokenizer = whole_tokenizer()
    return {
        "entities": gather(folder, "entities", token_classification(tokenizer, LABELS, max_length=16), logits=named),
        "questions": gather(
            folder,
            "questions",
            question_answering(tokenizer, max_length=16, stride=4),
            start_logits=first,
            end_logits=last,
        ),
        "masks": gather(folder, "masks", fill_mask(tokenizer, WORDS.index("[MASK]"), max_length=16), logits=fits),
        "vectors": gather(folder, "vectors", feature_extraction(tokenizer, 4, max_length=16), last_hidden_state=TABLE),
        "table": test_apis.table(folder),
        "entails": entails(folder),
    }


def entails(folder: Path) -> Archive:
    """Logits of contradiction, neutral and entailment: 0, 0 and the number of tokens of the second text."""
    nodes = [
        helper.make_node("Mul", ["attention_mask", "token_type_ids"], ["second"]),
        helper.make_node("ReduceSum", ["second", "axes"], ["count"], keepdims=1),
        helper.make_node("Cast", ["count"], ["many"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["many", "weights"], ["logits"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([1]), "axes"),
        numpy_helper.from_array(np.array([[0, 0, 1]], np.float32), "weights"),
    ]
    output = TensorSpec("logits", DType.FP32, ("batch", 3))
    inputs = [(spec.name, TensorProto.INT64, SHAPE) for spec in (MASK, TYPES)]
    graph = onnx_models.save(
        folder / "entails.onnx", nodes, inputs, [(output.name, TensorProto.FLOAT, output.shape)], constants
    )
    described = text_classification(tokenizer_file(), ["contradiction", "neutral", "entailment"], max_length=16)
    return test_apis.archive("entails", described, (MASK, TYPES), output, graph.read_bytes())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tokens")
    models = make(folder)
    for name, made in models.items():
        made.save(folder / f"{name}.ingot")
    with ingot.serve(*(str(folder / f"{name}.ingot") for name in models), http_port=0, grpc_port=0) as running:
        yield running


P2 = float(np.exp(2) / (np.exp(2) + 3))  # of a logit of 2 next to three of 0


class TestTensors:
    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_rows_are_padded_and_counted(self, server: RunningServer, protocol: str) -> None:
        with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
            found = client.infer("entities", {"text": texts("we film the story", "very bad", "story")})
            assert found["count"].tolist() == [2, 0, 1]
            assert found["entity"].tolist() == [[b"PER", b"LOC"], [b"", b""], [b"LOC", b""]]
            assert found["word"][0].tolist() == [b"we film", b"story"]
            assert found["start"].tolist() == [[0, 12], [-1, -1], [0, -1]]
            assert found["end"][0].tolist() == [7, 17]
            assert found["score"][0].tolist() == pytest.approx([P2, P2])
            none = client.infer("entities", {"text": texts("very bad")})
            assert none["entity"].shape == none["start"].shape == (1, 0)

    def test_windows_of_a_long_context(self, server: RunningServer) -> None:
        context = "we out not very bad good the story was never a dull and a fine film we out"
        raw = {"question": texts("the film", "a"), "context": texts(context, "not fine bad film")}
        found = server.infer("questions", raw)
        assert found["answer"].tolist() == [[b"fine film"], [b"fine bad film"]]
        assert context[found["start"][0, 0] : found["end"][0, 0]] == "fine film"
        assert found["tokens"][0] > 16
        assert found["cut_tokens"].tolist() == [0, 0]
        for name in ("question", "context"):
            with pytest.raises(InvalidArgument, match=f"element 1 of input '{name}' is empty; send a text"):
                server.infer("questions", {**raw, name: texts("a", "")})
        with pytest.raises(InvalidArgument, match=r"element 1 of input 'question' has 9 tokens, over the limit of 8"):
            server.infer("questions", {"question": texts("a", "a a a a a a a a a"), "context": texts("a", context)})

    def test_a_choice_of_each_item(self, server: RunningServer) -> None:
        raw = {"text": texts("we film", "we film"), "aggregation_strategy": texts("none", "simple")}
        found = server.infer("entities", raw)
        assert found["entity"].tolist() == [[b"B-PER", b"I-PER"], [b"PER", b""]]
        assert found["index"].tolist() == [[1, 2], [-1, -1]]

    def test_choices_that_there_are_not(self, server: RunningServer) -> None:
        with pytest.raises(InvalidArgument, match="'aggregation_strategy' is 'all'; send one of: none, simple, first"):
            server.infer("entities", {"text": texts("we"), "aggregation_strategy": texts("all")})
        with pytest.raises(InvalidArgument, match="input 'top_k' is 101; send a number from 1 to 100"):
            server.infer("masks", {"text": texts("[MASK]"), "top_k": np.array([101], np.int32)})

    def test_each_item_has_its_own_number_of_answers(self, server: RunningServer) -> None:
        limits = np.array([1, 3], np.int32)
        context = "not a fine film"
        found = server.infer(
            "questions", {"question": texts("a", "a"), "context": texts(context, context), "top_k": limits}
        )
        assert found["count"].tolist() == [1, 3]
        assert found["start"].shape == (2, 3)
        assert found["start"][0, 1:].tolist() == [-1, -1]
        assert found["answer"][0, 0] == found["answer"][1, 0]
        found = server.infer("masks", {"text": texts("a [MASK]", "[MASK] and [MASK]"), "top_k": limits})
        assert found["count"].tolist() == [1, 2]
        assert (found["token"] >= 0).sum(2).tolist() == [[1, 0], [3, 3]]
        assert found["sequence"][0, 0].tolist() == [b"a film", b"", b""]

    def test_lines_show_the_words_that_each_text_asked_for(self, server: RunningServer, run_ingot: RunIngot) -> None:
        inputs = ("--input", 'text=["a [MASK]", "[MASK]"]', "--input", "top_k=[1, 2]")
        first, second = succeeded(run_ingot("infer", server.http_url, "masks", *inputs)).splitlines()
        assert first.split()[:2] == ["0:", "film"]
        assert len(first.split()) == 3
        assert second.split()[1::2] == ["film", "story"]

    def test_texts_without_a_mask(self, server: RunningServer) -> None:
        with pytest.raises(InvalidArgument, match=r"element 1 of input 'text' has no \[MASK\]; put \[MASK\] where"):
            server.infer("masks", {"text": texts("[MASK]", "a film")})
        with pytest.raises(InvalidArgument, match=r"no \[MASK\] before it is cut: it has 7 tokens too many"):
            server.infer("masks", {"text": texts("a " * 20 + "[MASK]")})


class TestHuggingFace:
    def test_entities(self, server: RunningServer) -> None:
        found = post(server, "/models/entities", inputs="we film the story").json()
        assert found[0] == {"entity_group": "PER", "score": pytest.approx(P2), "word": "we film", "start": 0, "end": 7}
        each = post(
            server, "/models/entities", inputs=["we film", "bad"], parameters={"aggregation_strategy": "none"}
        ).json()
        assert [[item["entity"] for item in row] for row in each] == [["B-PER", "I-PER"], []]
        assert each[0][1]["index"] == 2
        ignored = {"ignore_labels": ["O", "PER"]}
        assert post(server, "/models/entities", inputs="we film", parameters=ignored).json() == []

    def test_answers(self, server: RunningServer) -> None:
        asked = {"question": "the film", "context": "not a fine film"}
        one = post(server, "/models/questions", inputs=asked).json()
        assert (one["answer"], one["start"], one["end"]) == ("fine film", 6, 15)
        several = post(server, "/models/questions", inputs=[asked], parameters={"top_k": 3}).json()
        assert several[0][0]["answer"] == "fine film"
        assert len(several[0]) == 3

    def test_missing_words(self, server: RunningServer) -> None:
        found = post(server, "/models/masks", inputs="a fine [MASK]", parameters={"top_k": 2}).json()
        assert [(item["token_str"], item["sequence"]) for item in found] == [
            ("film", "a fine film"),
            ("story", "a fine story"),
        ]
        assert found[0]["token"] == WORDS.index("film")
        two = post(server, "/models/masks", inputs=["[MASK] and [MASK]", "a [MASK]"]).json()
        assert two[0][1][0]["sequence"] == "[CLS] [MASK] and film [SEP]"
        assert len(two[1]) == 5

    def test_candidate_labels(self, server: RunningServer) -> None:
        labels = {"candidate_labels": ["film", "fine film"], "hypothesis_template": "{}"}
        found = post(server, "/models/entails", inputs="a", parameters=labels).json()
        e = np.exp([3.0, 2.0])
        assert [item["label"] for item in found] == ["fine film", "film"]
        assert [item["score"] for item in found] == pytest.approx((e / e.sum()).tolist(), abs=1e-6)
        several = post(server, "/models/entails", inputs="a", parameters={**labels, "multi_label": True}).json()
        assert several[0]["score"] == pytest.approx(e[0] / (e[0] + 1), abs=1e-6)
        raw = post(server, "/models/entails", inputs="a", parameters={"function_to_apply": "none"}).json()
        assert raw[0][0]["score"] == 0

    @pytest.mark.parametrize(
        ("model", "content", "part"),
        [
            (
                "entities",
                {"inputs": "a", "parameters": {"aggregation_strategy": "x"}},
                "parameters.aggregation_strategy",
            ),
            ("entities", {"inputs": "a", "parameters": {"ignore_labels": []}}, "lacks O"),
            ("entities", {"inputs": "a", "parameters": {"stride": 3}}, "divide texts"),
            ("questions", {"inputs": "a"}, "an object with question and context"),
            ("questions", {"inputs": {"question": "a"}}, "'inputs.context' is missing"),
            ("questions", {"inputs": {"question": "a", "context": ""}}, "'inputs.context' is empty"),
            (
                "questions",
                {"inputs": {"question": "a", "context": "a"}, "parameters": {"doc_stride": 9}},
                "'parameters.doc_stride' is 9; the model's steps declare 4",
            ),
            ("masks", {"inputs": ["a [MASK]", "a"]}, r"'inputs[1]' has no [MASK]"),
            ("masks", {"inputs": "[MASK]", "parameters": {"top_k": 1000}}, "'parameters.top_k' is 1000"),
            ("masks", {"inputs": "[MASK]", "parameters": {"targets": ["a"]}}, "parameters.targets"),
            ("masks", {"inputs": "[MASK]", "parameters": {"top_k": 1 << 40}}, "from 1 to 100"),
            ("masks", {"inputs": ["[MASK] " * 14] * 240, "parameters": {"top_k": 100}}, "send fewer texts, or a sm"),
            ("vectors", {"inputs": "a", "normalize": True}, "as the model makes them"),
            ("vectors", {"inputs": "a", "parameters": {"pooling": "mean"}}, "'parameters.pooling' is not a parameter"),
            ("vectors", {"inputs": "a", "parameters": 5}, "'parameters' is 5; it must be an object"),
            ("vectors", {"inputs": "a", "parameters": ""}, "must be an object"),
            ("vectors", {"inputs": "a", "parameters": []}, "must be an object"),
            ("entails", {"inputs": "a", "parameters": 5}, "'parameters' is 5; it must be an object"),
            ("vectors", {"inputs": "a", "parameters": {"prompt_name": "b"}}, "has no prompts"),
            # Refused before the text, or the template, is copied for each label: there would be gigabytes of them.
            ("entails", {"inputs": "a" * 4_000_000, "parameters": {"candidate_labels": ["b"] * 256}}, "has 4000000 ch"),
            (
                "entails",
                {"inputs": "a", "parameters": {"candidate_labels": ["b" * 1000], "hypothesis_template": "{}" * 1000}},
                "'parameters.candidate_labels[0]' makes a text of 1000000 characters",
            ),
            ("entails", {"inputs": "a", "parameters": {"candidate_labels": []}}, "candidate_labels"),
            (
                "entails",
                {"inputs": "a", "parameters": {"candidate_labels": ["a"], "hypothesis_template": "a"}},
                "the place of the label",
            ),
        ],
    )
    def test_errors(self, server: RunningServer, model: str, content: dict[str, Any], part: str) -> None:
        answer = post(server, f"/models/{model}", **content)
        assert answer.status_code == 400, answer.text
        assert part in answer.json()["error"]

    def test_the_client(self, server: RunningServer) -> None:
        hub = pytest.importorskip("huggingface_hub")
        clients = {
            name: hub.InferenceClient(model=f"{server.http_url}/models/{name}", token="none")
            for name in ("entities", "questions", "masks", "vectors", "entails")
        }
        [person, place] = clients["entities"].token_classification("we film the story", aggregation_strategy="first")
        assert (person.entity_group, person.word, place.end) == ("PER", "we film", 17)
        answer = clients["questions"].question_answering(question="the film", context="not a fine film")
        assert (answer.answer, answer.start) == ("fine film", 6)
        assert [item.token_str for item in clients["masks"].fill_mask("a [MASK]", top_k=2)] == ["film", "story"]
        vectors = clients["vectors"].feature_extraction("a film")
        np.testing.assert_allclose(vectors.mean(1), [mean("a", "film")], atol=1e-6)
        labels = clients["entails"].zero_shot_classification("a", ["film", "fine film"], hypothesis_template="{}")
        assert [item.label for item in labels] == ["fine film", "film"]


class TestTextEmbeddingsInference:
    @pytest.mark.parametrize("model", ["table", "vectors"])
    def test_vectors_of_all_tokens(self, server: RunningServer, model: str) -> None:
        found = post(server, f"/models/{model}/embed_all", inputs=["a film", "good"]).json()
        assert [len(row) for row in found] == [4, 3]
        ids = [WORDS.index(word) for word in ("[CLS]", "a", "film", "[SEP]")]
        np.testing.assert_allclose(found[0], TABLE[ids], atol=1e-6)

    def test_a_prompt_of_an_embedding(self, server: RunningServer) -> None:
        found = post(server, "/models/table/embed_all", inputs="film", prompt_name="query").json()
        assert len(found[0]) == 5

    def test_tokens(self, server: RunningServer) -> None:
        [first, second] = post(server, "/models/masks/tokenize", inputs=["a films", "é"]).json()
        special = {"special": True, "start": None, "stop": None}
        assert first == [
            {"id": WORDS.index("[CLS]"), "text": "[CLS]", **special},
            {"id": WORDS.index("a"), "text": "a", "special": False, "start": 0, "stop": 1},
            {"id": WORDS.index("film"), "text": "film", "special": False, "start": 2, "stop": 6},
            {"id": WORDS.index("##s"), "text": "s", "special": False, "start": 6, "stop": 7},
            {"id": WORDS.index("[SEP]"), "text": "[SEP]", **special},
        ]
        assert second[1]["text"] == "é"
        plain = post(server, "/models/masks/tokenize", inputs="a film", add_special_tokens=False).json()
        assert [item["text"] for item in plain[0]] == ["a", "film"]

    def test_decoding(self, server: RunningServer) -> None:
        ids = [WORDS.index(word) for word in ("[CLS]", "a", "film", "##s", "[SEP]")]
        assert post(server, "/models/masks/decode", ids=ids).json() == ["a films"]
        both = post(server, "/models/vectors/decode", ids=[ids, ids[1:2]], skip_special_tokens=False).json()
        assert both == ["[CLS] a films [SEP]", "a"]

    @pytest.mark.parametrize(
        ("path", "content", "cut"),
        [
            ("table/embed_all", {"inputs": ["a " * 30, "a"]}, 16),
            ("vectors/embed_all", {"inputs": ["a " * 30, "a"]}, 16),
            ("masks/tokenize", {"inputs": "a " * 30}, 0),
            ("masks/decode", {"ids": [1]}, 0),
        ],
    )
    def test_time_and_cut_tokens_are_counted(
        self, server: RunningServer, path: str, content: dict[str, Any], cut: int
    ) -> None:
        def read(name: str, labels: str = "") -> float:
            name = f'{name}{{model="{path.split("/")[0]}"{labels},version="1"}} '
            lines = httpx.get(f"{server.http_url}/metrics", trust_env=False).text.splitlines()
            return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)

        def counts() -> tuple[float, float]:
            return read("ingot_step_seconds_count", ',step="tokenize"'), read("ingot_cut_tokens_total")

        times, tokens = counts()
        assert post(server, f"/models/{path}", **content).status_code == 200
        assert counts() == (times + 1, tokens + cut)

    @pytest.mark.parametrize(
        ("path", "content", "part"),
        [
            ("/models/table/embed_all", {"inputs": "a " * 30, "truncate": False}, "'inputs' has 16 tokens too many"),
            ("/models/vectors/embed_all", {"inputs": "a " * 30, "truncate": False}, "has 16 tokens too many"),
            ("/models/masks/embed_all", {"inputs": "a"}, "whose task is fill-mask"),
            ("/models/masks/tokenize", {"inputs": []}, "empty list"),
            ("/models/masks/tokenize", {"inputs": ["a", "x" * 100_001]}, "'inputs[1]' has 100001 characters"),
            ("/models/masks/decode", {"ids": ["a"]}, "list of whole numbers"),
            ("/models/masks/decode", {"ids": [-1]}, "ids are from 0"),
            ("/models/masks/decode", {"ids": [[1]] * 2049}, "over the limit of 2048"),
            (
                "/models/masks/decode",
                {"ids": [1] * ((1 << 17) + 1)},
                "has 131073 tokens in all, over the limit of 131072",
            ),
            ("/models/masks/tokenize", {"inputs": ["a " * 40_000] * 4}, "'inputs' has more than 131072 tokens in all"),
            (
                "/models/vectors/embed_all",
                {"inputs": ["a " * 20] * 2048},
                "has 32768 tokens in all, over the limit of 16384",
            ),
            (
                "/models/table/embed_all",
                {"inputs": ["a " * 20] * 2048},
                "has 32768 tokens in all, over the limit of 16384",
            ),
            ("/models/masks/decode", {}, "list of whole numbers"),
        ],
    )
    def test_errors(self, server: RunningServer, path: str, content: dict[str, Any], part: str) -> None:
        answer = post(server, path, **content)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation"), answer.text
        assert part in answer.json()["error"]

    def test_the_root_serves_the_only_model_of_a_task(self, server: RunningServer) -> None:
        several = post(server, "/tokenize", inputs="a")
        assert several.status_code == 404
        assert "/models/masks" in several.json()["error"]
        listed = httpx.get(f"{server.http_url}/openapi.json", trust_env=False).json()["paths"]
        assert {"/embed_all", "/tokenize", "/decode", "/models/{model}/decode"} <= listed.keys()
