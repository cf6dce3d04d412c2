"""Texts in, labels out: raw requests of a model with steps, over each protocol, next to its tensor interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import AsyncClient, Client, RunningServer
from ingot.errors import InternalError, InvalidArchive, InvalidArgument, Unavailable
from ingot.model_store import Archive, BlobFolder, Golden, add_variant
from ingot.runtime import Model, ModelSource, ServingTerms, Settings
from ingot.runtime.dispatch.fair_threads import FairThreads
from ingot.steps import Described, OpenedSteps, Steps, text_classification
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.runtime.waiting import wait_until
from tests.steps.bert import tokenizer_file
from tests.support import RunIngot, refused, run_python, succeeded

SHAPE = ("batch", "seq")
SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT64, SHAPE), TensorSpec("attention_mask", DType.INT64, SHAPE)),
    (TensorSpec("logits", DType.FP32, ("batch", 2)),),
    "batch",
    {"seq": Range(1, 16)},
)


def counter(folder: Path) -> bytes:
    """logits = the number of tokens, and 4.5: texts of two words and less are short, with the special tokens."""
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["seen"]),
        helper.make_node("Sign", ["seen"], ["ones"]),
        helper.make_node("ReduceSum", ["attention_mask", "axes"], ["count"], keepdims=1),
        helper.make_node("ReduceSum", ["ones", "axes"], ["known"], keepdims=1),
        helper.make_node("Max", ["count", "known"], ["most"]),
        helper.make_node("Cast", ["most"], ["long"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["long", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "limit"], ["short"]),
        helper.make_node("Concat", ["long", "short"], ["logits"], axis=1),
    ]
    constants = [
        numpy_helper.from_array(np.array([1]), "axes"),
        numpy_helper.from_array(np.array(0, np.float32), "zero"),
        numpy_helper.from_array(np.array(4.5, np.float32), "limit"),
    ]
    inputs = [(spec.name, TensorProto.INT64, SHAPE) for spec in SIGNATURE.inputs]
    graph = onnx_models.save(
        folder / "counter.onnx", nodes, inputs, [("logits", TensorProto.FLOAT, ("batch", 2))], constants
    )
    return graph.read_bytes()


def logits(inputs: dict[str, Array]) -> dict[str, Array]:
    count = inputs["attention_mask"].sum(1).astype(np.float32)
    return {"logits": np.stack([count, np.full_like(count, 4.5)], 1)}


def make(
    folder: Path,
    name: str = "length",
    *,
    answer: bytes = b"",
    tokenizer: bytes | None = None,
    tested: bool = True,
    labels: Sequence[str] = ("LONG", "SHORT"),
    golden: Sequence[str] = ("a fine film", "good"),
    pad_id: int = 0,
) -> Archive:
    """Return an archive; its golden has another answer than it gives if ``answer`` is set. None if not ``tested``."""
    described = text_classification(tokenizer_file(), labels, max_length=16, max_characters=1000, pad_id=pad_id)
    goldens = [_golden(described, golden, answer)] if tested else []
    files = described.files if tokenizer is None else {"tokenizer.json": tokenizer}
    padding = {"seq": Padding({"input_ids": 0, "attention_mask": 0})}
    return archive_of(name, counter(folder), SIGNATURE, goldens, files, padding=padding, steps=described.steps)


def _golden(described: Described, items: Sequence[str], answer: bytes) -> Golden:
    opened = described.steps.open(described.files.__getitem__, SIGNATURE)
    raw = {"text": texts(*items)}
    prepared = opened.prepare(raw)
    answers = opened.finish(prepared, logits(opened.tensors(prepared)))
    if answer:
        answers["label"] = np.full_like(answers["label"], answer)
    return Golden(opened.tensors(prepared), logits(opened.tensors(prepared)), raw, answers)


def texts(*items: str | bytes) -> Array:
    array = np.empty(len(items), object)
    array[:] = [item.encode() if isinstance(item, str) else item for item in items]
    return array


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    make(folder).save(folder / "length.ingot")
    return folder / "length.ingot"


@pytest.fixture(scope="module")
def stepped(path: Path) -> Iterator[RunningServer]:
    with ingot.serve(str(path), http_port=0, grpc_port=0) as running:
        yield running


def check(found: dict[str, Array]) -> None:
    assert found["label"].tolist() == [[b"LONG", b"SHORT"], [b"SHORT", b"LONG"]]
    assert found["score"][0, 0] == pytest.approx(1 / (1 + np.exp(4.5 - 5)), abs=1e-6)
    assert found["tokens"].tolist() == [5, 3]
    assert found["cut_tokens"].tolist() == [0, 0]


REQUEST = {"text": texts("a fine film", "good")}


class TestAnswers:
    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_over_each_protocol(self, stepped: RunningServer, protocol: str) -> None:
        url = stepped.http_url if protocol == "http" else stepped.grpc_url
        with Client(url) as client:
            check(client.infer("length", REQUEST))
            check(client.infer("length", REQUEST, binary=False))
            only = client.infer("length", REQUEST, outputs=["score"])
            assert list(only) == ["score"]
            with pytest.raises(InvalidArgument, match="unknown output 'logits'; the model has label, score, tokens"):
                client.infer("length", REQUEST, outputs=["logits"])

    def test_over_the_asynchronous_client_and_in_process(self, stepped: RunningServer) -> None:
        async def ask() -> dict[str, Array]:
            async with AsyncClient(stepped.http_url) as client:
                return await client.infer("length", REQUEST)

        check(asyncio.run(ask()))
        check(stepped.infer("length", REQUEST))

    def test_tritonclient(self, stepped: RunningServer) -> None:
        triton = pytest.importorskip("tritonclient.http")
        tensor = triton.InferInput("text", [2], "BYTES")
        tensor.set_data_from_numpy(REQUEST["text"])
        with triton.InferenceServerClient(stepped.http_url.removeprefix("http://")) as client:
            found = client.infer("length", [tensor])
        check({name: found.as_numpy(name) for name in ("label", "score", "tokens", "cut_tokens")})

    def test_ids_are_still_accepted(self, stepped: RunningServer) -> None:
        inputs = {"input_ids": np.array([[2, 5, 3]]), "attention_mask": np.array([[1, 1, 1]])}
        with Client(stepped.http_url) as client:
            assert client.infer("length", inputs)["logits"].tolist() == [[3, 4.5]]
            with pytest.raises(InvalidArgument, match="unknown input 'input_ids'; the model's raw inputs are 'text'"):
                client.infer("length", {**inputs, "text": texts("a")})

    def test_a_name_that_neither_the_steps_nor_the_graph_have(self, stepped: RunningServer) -> None:
        for url in (stepped.http_url, stepped.grpc_url):
            with (
                Client(url) as client,
                pytest.raises(
                    InvalidArgument,
                    match=r"unknown input 'txt'; .* raw inputs are 'text'.* takes 'input_ids', 'att",
                ),
            ):
                client.infer("length", {"txt": texts("a")})

    def test_pairs_and_cut_texts(self, stepped: RunningServer) -> None:
        found = stepped.infer("length", {"text": texts("a", "a " * 20), "text_pair": texts("good", "bad")})
        assert found["tokens"].tolist() == [5, 16]
        assert found["cut_tokens"].tolist() == [0, 8]

    def test_requests_of_other_lengths_share_batches(self, path: Path) -> None:
        async def ask(client: AsyncClient, words: int) -> dict[str, Array]:
            return await client.infer("length", {"text": texts("a " * words)})

        async def all_of_them(url: str) -> list[dict[str, Array]]:
            async with AsyncClient(url) as client:
                return await asyncio.gather(*(ask(client, 1 + index % 9) for index in range(40)))

        with ingot.serve(str(path), http_port=0, grpc_port=0, max_delay=1) as server:
            answers = asyncio.run(all_of_them(server.http_url))
            with Client(server.http_url) as client:
                [counted] = client.statistics("length")
        assert counted["inference_count"] == 40
        assert counted["execution_count"] < 40
        for index, found in enumerate(answers):
            assert found["tokens"].tolist() == [3 + index % 9]
            assert found["label"][0, 0] == (b"LONG" if 3 + index % 9 > 4 else b"SHORT")

    def test_the_command_prints_labels(self, stepped: RunningServer, run_ingot: RunIngot, tmp_path: Path) -> None:
        asked = run_ingot("infer", stepped.http_url, "length", "--input", "text=a fine film")
        assert succeeded(asked) == "  LONG 0.622   SHORT 0.378\n"
        (tmp_path / "film.txt").write_text("a fine film")
        several = run_ingot("infer", stepped.grpc_url, "length", "--input", 'text=["a", "a fine film"]')
        assert succeeded(several) == "  SHORT 0.818   LONG 0.182\n  LONG 0.622   SHORT 0.378\n"
        of_file = run_ingot("infer", stepped.http_url, "length", "--input", "text=@film.txt")
        assert succeeded(of_file) == "  LONG 0.622   SHORT 0.378\n"
        unknown = run_ingot("infer", stepped.http_url, "length", "--input", "txt=a")
        assert (
            "the model's inputs are text, text_pair, function_to_apply, or the tensors input_ids, attention_mask"
            in refused(unknown)
        )
        mixed = run_ingot("infer", stepped.http_url, "length", "--input", 'text=["a", 1]')
        assert "the list of input 'text' has an element that is not a text" in refused(mixed)


class TestDescription:
    def test_metadata_lists_the_graphs_tensors_and_names_the_raw_ones(self, stepped: RunningServer) -> None:
        for url in (stepped.http_url, stepped.grpc_url):
            with Client(url) as client:
                metadata = client.metadata("length")
            assert [spec["name"] for spec in metadata["inputs"]] == ["input_ids", "attention_mask"]
            properties = metadata["properties"]
            assert properties["task"] == "text-classification"
            assert properties["raw_inputs"] == "text:string[batch]"
            assert properties["raw_optional_inputs"] == "text_pair:string[batch]; function_to_apply:string[batch]"
            assert properties["raw_outputs"].startswith("label:string[batch,2]; score:float32[batch,2]; tokens:int32")

    def test_time_and_cut_tokens_are_counted(self, stepped: RunningServer) -> None:
        def read() -> dict[str, float]:
            lines = httpx.get(f"{stepped.http_url}/metrics", trust_env=False).text.splitlines()
            return {name: float(value) for name, value in (line.split(" ", 1) for line in lines if line[0] != "#")}

        before = read()
        stepped.infer("length", {"text": texts("a " * 20)})
        after = read()
        labels = 'model="length"'
        for step in ("tokenize", "classify"):
            name = f'ingot_step_seconds_count{{{labels},step="{step}",version="1"}}'
            assert after[name] == before.get(name, 0) + 1
        name = f'ingot_cut_tokens_total{{{labels},version="1"}}'
        assert after[name] == before.get(name, 0) + 6
        with Client(stepped.http_url) as client:
            [statistics] = client.statistics("length")
        assert statistics["ingot"]["steps"]["tokenize"]["count"] >= 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            ({"datatype": "FP32", "shape": [1], "data": [1]}, "input 'text' is FP32 of 1 dimensions"),
            ({"datatype": "BYTES", "shape": [0], "data": []}, "input 'text' is empty"),
            ({"datatype": "BYTES", "shape": [1, 1], "data": ["a"]}, "input 'text' is BYTES of 2 dimensions"),
            ({"datatype": "BYTES", "shape": [10_000], "data": ["a"] * 10_000}, "has 10000 items, over the limit"),
            ({"datatype": "BYTES", "shape": [1], "data": ["a" * 10_000_000]}, "has 10000000 characters, over the"),
        ],
        ids=["numbers", "none", "two-dimensions", "many", "long"],
    )
    def test_is_refused_by_name(self, stepped: RunningServer, tensor: dict[str, Any], message: str) -> None:
        answer = httpx.post(
            f"{stepped.http_url}/v2/models/length/infer",
            json={"inputs": [{"name": "text", **tensor}]},
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]
        check(stepped.infer("length", REQUEST))

    def test_one_second_text_for_several_first_ones(self, stepped: RunningServer) -> None:
        with pytest.raises(InvalidArgument, match="input 'text_pair' has 1 items, input 'text' 2"):
            stepped.infer("length", {**REQUEST, "text_pair": texts("a")})

    def test_bytes_that_are_not_text(self, stepped: RunningServer) -> None:
        for url in (stepped.http_url, stepped.grpc_url):
            with (
                Client(url) as client,
                pytest.raises(InvalidArgument, match="element 1 of input 'text' is not valid UTF-8"),
            ):
                client.infer("length", {"text": texts("a", b"\xff")})

    def test_a_failure_of_the_tokenizer_is_an_error_of_its_request(self, tmp_path: Path) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        known = [(word, -1.0) for word in ("<pad>", " ", *"\U0010fffd\ue000\u0b72")]  # and nothing for unknown words
        made = tokenizers.Tokenizer(tokenizers.models.Unigram(known)).to_str()
        make(tmp_path, tokenizer=made.encode(), tested=False).save(tmp_path / "fails.ingot")
        with (
            ingot.serve(str(tmp_path / "fails.ingot"), http_port=0, grpc_port=0) as running,
            Client(running.http_url) as client,
            pytest.raises(InvalidArgument, match="tokenizer cannot encode input 'text'; send another text: Exception"),
        ):
            client.infer("length", REQUEST)


@pytest.mark.parametrize("state", ["stuck", "failed"])
async def test_a_model_that_cannot_run_answers_raw_requests_that_wait(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, settings = make(tmp_path), Settings(warm_time=0)
    served = Model("length", "1", ModelSource.of_archive(archive, settings, "length"), ServingTerms(settings))
    await asyncio.to_thread(served.load)
    [worker] = served.workers
    with contextlib.closing(FairThreads(1, "steps")) as threads:
        monkeypatch.setattr("ingot.runtime.dispatch.stepped.preparing", threads)
        gate = threading.Event()
        threads.submit("length", lambda: gate.wait(30))
        asked = asyncio.create_task(served.infer(REQUEST))
        await wait_until(lambda: served.in_flight)
        if state == "stuck":
            served.suspend("a call does not end", worker, InternalError("it did not end"))
        else:
            served._devices_lost("its device failed")
        with pytest.raises(Unavailable, match=f"model 'length' version 1 is {state}"):
            await asyncio.wait_for(asked, 30)
        gate.set()
        await asyncio.wait_for(served.drain(), 30)
    served.close()


class TestLoading:
    def test_a_tokenizer_that_panics_when_it_is_opened(self, tmp_path: Path) -> None:
        panics = {**json.loads(tokenizer_file()), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
        make(tmp_path, tokenizer=json.dumps(panics).encode()).save(tmp_path / "panics.ingot")
        with pytest.raises(InvalidArchive, match=r"the tokenizer 'tokenizer\.json' cannot be read: Panicked: "):
            ingot.serve(str(tmp_path / "panics.ingot"), http_port=0, grpc_port=0)

    def test_a_damaged_tokenizer(self, tmp_path: Path) -> None:
        content = json.loads(tokenizer_file())
        panics = {**content, "pre_tokenizer": {"type": "FixedLength", "length": 0}}
        unknown = {**content, "model": {**content["model"], "unk_token": "[NONE]"}}
        for damaged, reason in ((panics, "Panicked: "), (unknown, "Exception: WordPiece error: Missing")):
            make(tmp_path, tokenizer=json.dumps(damaged).encode(), tested=False).save(tmp_path / "damaged.ingot")
            with pytest.raises(InvalidArchive, match=f"cannot encode what its vocabulary lacks: {reason}"):
                ingot.serve(str(tmp_path / "damaged.ingot"), http_port=0, grpc_port=0)

    def test_padding_that_no_token_has(self, tmp_path: Path) -> None:
        made = make(tmp_path, pad_id=9999, tested=False)
        made.save(tmp_path / "damaged.ingot")
        with pytest.raises(InvalidArgument, match=r"pad_id of step 'tokenize' is 9999, which no token of"):
            ingot.serve(str(tmp_path / "damaged.ingot"), http_port=0, grpc_port=0)

    def test_goldens_are_replayed_through_the_steps(self, tmp_path: Path) -> None:
        make(tmp_path, answer=b"OTHER").save(tmp_path / "wrong.ingot")
        with pytest.raises(InternalError, match="output 'label' of the steps after golden case 0 departs"):
            ingot.serve(str(tmp_path / "wrong.ingot"), http_port=0, grpc_port=0)

    def test_another_tokenizer_is_found(self, tmp_path: Path) -> None:
        other = tokenizer_file().replace(b'"lowercase":true', b'"lowercase":false').replace(b'"film":', b'"firm":')
        make(tmp_path, tokenizer=other).save(tmp_path / "wrong.ingot")
        with pytest.raises(InternalError, match="output 'input_ids' of the steps before golden case 0 departs"):
            ingot.serve(str(tmp_path / "wrong.ingot"), http_port=0, grpc_port=0)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        archive = make(tmp_path)
        variant = archive.variant()
        blobs = archive.blobs
        assert isinstance(blobs, BlobFolder)
        without = Archive.create(
            blobs, [add_variant(blobs, variant.serving, variant.graph, variant.weights, variant.goldens())]
        )
        with pytest.raises(InvalidArchive, match=r"lacks the file 'tokenizer\.json', which its steps need"):
            without.variant().opened_steps()

    def test_a_missing_package_is_named(self, path: Path) -> None:
        code = (
            "import sys; sys.modules['tokenizers'] = None\n"
            "import ingot\n"
            "try:\n"
            f"    ingot.Archive.open({str(path)!r}).variant().opened_steps()\n"
            "except ingot.IngotError as error:\n"
            "    print(error)"
        )
        assert "needs the package 'tokenizers'" in (printed := run_python(code))
        assert "pip install 'ingot-serve[text]'" in printed

    def test_serving_imports_neither_torch_nor_transformers(self, path: Path) -> None:
        code = (
            "import sys, numpy, ingot\n"
            f"with ingot.serve({str(path)!r}, http_port=0, grpc_port=0) as server:\n"
            "    server.infer('length', {'text': numpy.array([b'a'], object)})\n"
            "print(sorted({'torch', 'transformers'} & set(sys.modules)), 'tokenizers' in sys.modules)"
        )
        assert run_python(code) == "[] True\n"


class TestArchive:
    def test_steps_and_files_survive_a_round_trip(self, path: Path, tmp_path: Path) -> None:
        archive = Archive.open(path)
        archive.verify()
        variant = archive.variant()
        assert variant.step_files() == {"tokenizer.json": tokenizer_file()}
        assert isinstance(variant.opened_steps(), OpenedSteps)
        assert variant.serving.steps == Steps.model_validate_json(variant.serving.steps.model_dump_json())  # type: ignore[union-attr]
        [golden] = variant.goldens()
        assert golden.raw["text"].tolist() == [b"a fine film", b"good"]
        assert golden.answers["label"].shape == (2, 2)

    def test_another_form_of_the_graph_gets_its_own_answers(self, path: Path) -> None:
        [golden] = Archive.open(path).variant().rerun(lambda inputs: {"logits": -logits(dict(inputs))["logits"]})
        assert golden.answers["label"].tolist() == [[b"SHORT", b"LONG"], [b"LONG", b"SHORT"]]

    def test_diff_names_a_changed_tokenizer(self, path: Path, tmp_path: Path) -> None:
        from ingot.model_store.diff import diff

        other = make(tmp_path, tokenizer=tokenizer_file() + b" ")
        [variant] = diff(Archive.open(path), other).variants
        assert [change.what for change in variant.changes] == ["file tokenizer.json"]
