"""Folders of tasks on tokens: steps that are proved against transformers' pipelines, and their rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument
from ingot.export import export_model, load_source, tasks
from ingot.export.tasks import questions
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from ingot.steps import feature_extraction, fill_mask
from ingot.steps.samples import texts
from tests.steps import bert
from tests.support import RunIngot, refused, succeeded

LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
NAMED: dict[str, Any] = {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}}


def export(folder: Path, task: tasks.Task = "auto") -> Archive:
    found = tasks.find(folder, task)
    assert found is not None
    module: Any = load_source(str(found.folder))
    return export_model(module, pad="seq", steps=found.describe(module), name="net")


@pytest.mark.parametrize(
    ("model", "task", "last", "answers"),
    [
        ("BertForTokenClassification", "token-classification", "entities", 128),
        ("BertForQuestionAnswering", "question-answering", "span", 64),
        ("BertForMaskedLM", "fill-mask", "fill", 128),
    ],
)
@pytest.mark.matrix
def test_the_command_finds_the_task(
    run_ingot: RunIngot, tmp_path: Path, model: str, task: str, last: str, answers: int
) -> None:
    config = NAMED if task == "token-classification" else {}
    result = run_ingot("export", bert.save(tmp_path / "net", model, **config), "--out", tmp_path / "net.ingot")
    succeeded(result)
    assert f"{task} (config: " in result.stderr
    assert f"tokenize -> graph -> {last}; answers of {answers} " in result.stderr
    shown = succeeded(run_ingot("inspect", tmp_path / "net.ingot"))
    limit = "divided into rows that share 32 tokens" if last == "span" else "cut, and counted in cut_tokens"
    assert limit in " ".join(shown.split())
    variant = Archive.open(tmp_path / "net.ingot").variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert proof.error < 1e-5
    goldens = [case for case in variant.goldens() if case.raw]
    assert len(goldens) >= 1
    assert all((case.answers["count"] >= 1).any() for case in goldens)


@pytest.mark.parametrize("save", [bert.save_distilbert, bert.save_roberta])
@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "Model"])
@pytest.mark.matrix
def test_other_architectures(tmp_path: Path, save: Any, head: str) -> None:
    """The export itself compares 50 and more answers with transformers'."""
    family = "DistilBert" if save is bert.save_distilbert else "Roberta"
    config = NAMED if head == "ForTokenClassification" else {}
    folder = save(tmp_path / "net", f"{family}{head}", **config)
    variant = export(folder, "feature-extraction" if head == "Model" else "auto").variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert proof.answers >= 50
    assert proof.error < 1e-5


@pytest.mark.matrix
def test_vectors_of_tokens(tmp_path: Path) -> None:
    variant = export(bert.save(tmp_path / "net", "BertModel"), "feature-extraction").variant()
    [golden, *_] = [case for case in variant.goldens() if case.raw]
    for row, count in zip(golden.answers["vectors"], golden.answers["tokens"], strict=True):
        assert (np.abs(row[:count]).sum(1) > 0).all()
        assert not row[count:].any()


def test_a_task_needs_its_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    found = tasks.find(tmp_path)
    assert found is not None
    assert found.task == "fill-mask"
    for task in ("token-classification", "question-answering", "feature-extraction"):
        with pytest.raises(InvalidArgument, match=f"task {task} needs a model .*; .* has BertForMaskedLM"):
            tasks.find(tmp_path, task)


@pytest.mark.long
def test_answers_are_those_of_transformers_4(tmp_path: Path) -> None:
    """Version 5 has no pipeline for questions."""
    old = tmp_path / "old"
    pinned = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface_hub==0.36.0")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(old),
    ]
    subprocess.run([*pip, *pinned], check=True)
    folder = bert.save(tmp_path / "net", "BertForQuestionAnswering")
    variant = export(folder).unpacked().variant()
    opened = variant.opened_steps()
    assert opened is not None
    [samples] = questions._samples()
    hard = [text for text in texts.hard() if text.strip()][:150]
    pairs = [(one.decode(), other.decode()) for one, other in zip(*samples.values(), strict=True)]
    pairs += [("who is it?", text) for text in hard]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    script = Path(__file__).parent / "transformers4.py"
    command = [sys.executable, str(script), str(old), str(folder), str(tmp_path / "pairs.json"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    engine = load_engine(EngineSpec(variant.path(), device="cpu"))
    for (question, context), expected in zip(pairs, json.loads(done.stdout), strict=True):
        raw = {"question": texts.as_array([question]), "context": texts.as_array([context])}
        found = opened.run({**raw, "top_k": np.array([3], np.int32)}, engine.run)
        known = [each for each in expected if each["score"] > 0]  # the pipeline adds impossible ones
        assert [item.decode() for item in found["answer"][0]] == [each["answer"] for each in known]
        for name in ("start", "end", "score"):
            assert found[name][0].tolist() == pytest.approx([each[name] for each in known], abs=1e-5)
    engine.close()


class Scores(nn.Module):
    """Logits of each token's id, for each of the classes."""

    def __init__(self, classes: int):
        super().__init__()
        # Distinct scores of a token, so that rounding does not change their order.
        scores = (torch.arange(200)[:, None] * 7 + torch.arange(classes) * 3) % 211
        self.table = nn.Parameter(scores.float())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.table[(input_ids * attention_mask).clamp(0, 199)]


INPUTS = ["input_ids:int64[batch,seq=1..64]", "attention_mask:int64[batch,seq=1..64]"]


class TestAModelFromElsewhere:
    @pytest.fixture
    def graph(self, tmp_path: Path) -> Path:
        archive = export_model(Scores(5), inputs=INPUTS, output_names=["logits"], pad="seq", name="net")
        path = tmp_path / "net.onnx"
        shutil.copyfile(archive.unpacked().variant().path(), path)
        return path

    def test_its_steps_are_those_of_a_folder(self, graph: Path, run_ingot: RunIngot, tmp_path: Path) -> None:
        folder = bert.save(tmp_path / "folder", "BertForTokenClassification", **NAMED)
        result = run_ingot("export", graph, "--steps", folder, "-o", tmp_path / "net.ingot")
        succeeded(result)
        assert "312 hard texts: ids equal" in result.stderr
        assert "no original confirms their answers" in result.stderr
        variant = Archive.open(tmp_path / "net.ingot").variant()
        steps, proof = variant.serving.steps, variant.serving.evidence.steps
        assert steps is not None
        assert proof is not None
        assert (steps.task, proof.items, proof.answers) == ("token-classification", 312, 0)
        assert steps.before[0].max_length == 64  # type: ignore[union-attr]
        assert any("entity" in case.answers for case in variant.goldens())

    def test_the_task_may_be_named(self, graph: Path, run_ingot: RunIngot, tmp_path: Path) -> None:
        folder = bert.save(tmp_path / "folder", "BertForTokenClassification", **NAMED)
        out = ("-o", tmp_path / "net.ingot")
        named = run_ingot("export", graph, "--steps", folder, "--task", "fill-mask", *out)
        assert "task fill-mask needs a model ...ForMaskedLM" in refused(named)
        (folder / "config.json").unlink()
        unknown = run_ingot("export", graph, "--steps", folder, *out)
        assert "its config.json must name the architecture" in refused(unknown)

    def test_another_number_of_labels(self, graph: Path, tmp_path: Path) -> None:
        described = tasks.of_folder(bert.save(tmp_path / "folder", "BertForTokenClassification", num_labels=2))
        with pytest.raises(InvalidArgument, match="has 2 labels, but 'logits' has 5 classes"):
            export_model(graph, steps=described, name="net")


def test_declared_steps_of_missing_words() -> None:
    steps = fill_mask(bert.tokenizer_file(), bert.vocabulary().index("*"), max_length=64)
    net = Scores(len(bert.vocabulary()))
    archive = export_model(net, inputs=INPUTS, output_names=["logits"], pad="seq", steps=steps, name="net")
    [golden] = [case for case in archive.variant().goldens() if case.raw]
    assert golden.answers["count"].tolist() == [1, 1, 1]


def test_declared_steps_that_refuse_long_texts_run_on_short_ones() -> None:
    steps = feature_extraction(bert.tokenizer_file(), 5, output="logits", max_length=16, overflow="refuse")
    archive = export_model(Scores(5), inputs=INPUTS, output_names=["logits"], pad="seq", steps=steps, name="net")
    [golden] = [case for case in archive.variant().goldens() if case.raw]
    assert golden.answers["tokens"].max() <= 16
