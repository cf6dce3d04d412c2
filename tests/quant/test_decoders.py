"""Quantized decoders through the command line: what is measured, what is recorded, and that it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

import ingot
from ingot.model_store import Archive, BlobFolder
from ingot.model_store.format import goldens, onnx_graph
from ingot.quant.config import WeightInt8, embeddings
from ingot.quant.graph.decoder import DecoderSource
from ingot.quant.graph.layers import tensor
from ingot.quant.schemes import plan
from ingot.runtime.loading import comparison
from ingot.runtime.loading.choice import Chooser
from ingot.runtime.settings.settings import Settings
from tests.export.decoder import tiny
from tests.support import RunIngot, succeeded

TEXT = "the film was fine and the cast was bright, hello there: an answer to a question of the user. " * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoders") / "tiny"
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "hidden_size": 1024, "intermediate_size": 64}
    model = tiny.save(path, tie_word_embeddings=True, **sizes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.1)  # so that several tokens are likely
    model.save_pretrained(path)
    return path


@pytest.fixture
def archive(run_ingot: RunIngot, folder: Path) -> Path:
    path = folder.parent / "tiny.ingot"
    if not path.exists():
        succeeded(run_ingot("export", folder, "--out", path))
    return path


def perplexity(folder: Path, rows: list[list[int]]) -> float:
    """The original's, of texts that are read alone."""
    causal: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        logits = causal.from_pretrained(folder).eval()(torch.tensor(rows)).logits.double().log_softmax(-1)
    chosen = logits[:, :-1].gather(-1, torch.tensor(rows)[:, 1:, None])
    return float((-chosen).mean().exp())


def test_a_quantized_decoder_is_measured_on_a_text_and_served(
    run_ingot: RunIngot, archive: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--recipe", "weight-int8", "--option", "block=32", "--force", "--data", tmp_path / "text.txt")
    made = run_ingot("quantize", archive, *options, "--threads", "1", "--json", "--out", tmp_path / "q.ingot")
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)["report"]
    auto: Any = transformers.AutoTokenizer
    ids = auto.from_pretrained(folder)(TEXT)["input_ids"]
    rows = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)][:64]
    assert report["metric"] == "perplexity"
    assert report["data"]["evaluation_rows"] == len(rows)
    assert report["before"]["value"] == pytest.approx(perplexity(folder, rows), rel=1e-3)
    increase = report["after"]["value"] / report["before"]["value"] - 1
    assert report["drop"]["value"] == pytest.approx(increase, rel=1e-6)
    opened = Archive.open(tmp_path / "q.ingot")
    quantized, original = opened.variant("int8").serving, opened.variant("fp32").serving
    assert quantized.generation == original.generation
    (agreement,) = quantized.evidence.agreement
    assert agreement.top1 is not None
    assert 0.7 < agreement.top1 < 1
    assert quantized.evidence.metric is not None
    assert any("logits of rows at once differ from those of a row alone" in note for note in report["notes"])
    shown = run_ingot("inspect", tmp_path / "q.ingot").stdout
    assert "likely" in shown
    assert "equal to generate()'s" in shown
    monkeypatch.setattr(comparison, "recorded", lambda variants: None)  # as on a machine without records
    twice = (opened.unpacked().variant("fp32"),) * 2  # int8 is beyond its budget
    chosen = Chooser("q", twice, Settings(device="cpu", slots=3))()
    chosen.engine.close()
    assert chosen.reason == "measured"
    assert "could not be timed" not in chosen.why
    answers = [text(f"{tmp_path / 'q.ingot'}#{name}") for name in ("int8", "fp32")]
    assert min(map(len, answers)) > 10


def test_recorded_texts_are_data(run_ingot: RunIngot, archive: Path, tmp_path: Path) -> None:
    written = text(str(archive), record=tmp_path / "traffic", record_share=1.0)
    (file,) = (tmp_path / "traffic" / "tiny" / "1").glob("*.safetensors")
    (case,) = goldens.decode(file.read_bytes())
    texts = Archive.open(archive).variant().opened_texts()
    assert texts is not None
    assert case.inputs["prompt"].tolist() == texts.encode("the film")
    assert texts.tokens.of(case.outputs["tokens"].tolist()) == written
    options = ("--recipe", "weight-int8", "--force", "--batch", "1", "--data", tmp_path / "traffic")
    result = run_ingot("quantize", archive, *options, "--json", "--out", tmp_path / "q.ingot")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["report"]["data"]["evaluation_rows"] == (case.inputs["prompt"].size + 80) // 64


def text(reference: str, **settings: Any) -> str:
    with ingot.serve(reference, http_port=0, grpc_port=0, slots=2, **settings) as server:
        body = {"model": "tiny", "prompt": "the film", "max_tokens": 80, "ignore_eos": True}
        found: str = httpx.post(f"{server.http_url}/v1/completions", json=body).json()["choices"][0]["text"]
        return found


@pytest.mark.matrix
def test_the_search_tries_weights_alone(run_ingot: RunIngot, archive: Path, tmp_path: Path) -> None:
    result = run_ingot(
        "quantize", archive, "--metric", "tokens", "--batch", "1", "--json", "--out", tmp_path / "q.ingot"
    )
    assert result.returncode in (0, 3), result.stderr
    report = json.loads(result.stdout)["report"]
    assert {item["name"] for item in report["candidates"]} >= {"int8 weights", "int4 weights"}
    assert {*report["candidates"][0]["recipe"]["schemes"].values()} <= {"int8", "int4"}
    assert "measured on generated texts only" in " ".join(report["notes"])
    scores = {item["name"]: item["score"]["value"] for item in report["candidates"]}
    # Of random weights, several tokens are nearly as likely; one chosen at random would be equal in under 1 %.
    assert 0.2 < scores["int4 weights"] < scores["int8 weights"] <= 1
    assert scores["int8 weights"] > 0.8


def test_tied_weights_are_quantized_where_the_embedding_stays(archive: Path, tmp_path: Path) -> None:
    blobs = BlobFolder(tmp_path)
    source = DecoderSource(Archive.open(archive).copy_to(blobs).variant())
    whole = WeightInt8().plan(source)
    model = plan.make(source, whole.keep(embeddings(source)), {})
    weights = onnx_graph.pack(model, BlobFolder.scratch(), blobs)[1]
    table = source.by_name(source.model())[embeddings(source)[0]].weight
    assert tensor(table).nbytes in [item.size for item in weights]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "dynamic-int8"), "'dynamic-int8' is not for models that generate text"),
        (("--metric", "cosine"), "there is no metric 'cosine' of models that generate text; known: perplexity, tokens"),
        (("--data", "none.txt"), "there is no file"),
        (("--data", "short.txt"), "has 2 tokens; pass a text of 64 or more"),
        (("--data", "ids.npz"), "the model has the tokens 0 to"),
    ],
)
def test_what_a_decoder_lacks_is_refused(
    run_ingot: RunIngot, archive: Path, tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("zz")
    np.savez(tmp_path / "ids.npz", tokens=np.full((2, 8), 5000))
    result = run_ingot("quantize", archive, *options, "--out", tmp_path / "q.ingot", cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
