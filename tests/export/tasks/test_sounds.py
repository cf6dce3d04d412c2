"""Folders of models of sounds: steps that are proved against transformers' extractors and pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ingot.cli.create import export as command
from ingot.errors import InvalidArgument, Unsupported
from ingot.export import export_model, tasks
from ingot.export.source.defaults import of
from ingot.model_store import Archive
from ingot.steps import audio_classification
from ingot.steps.sounds.operations import Normalize
from tests.steps import speech
from tests.support import RunIngot, succeeded


@pytest.mark.matrix
def test_a_classifier_answers_with_labels(run_ingot: RunIngot, tmp_path: Path) -> None:
    folder = speech.spectrogram_transformer(tmp_path / "ast")
    result = run_ingot("export", folder, "--out", tmp_path / "ast.ingot")
    assert succeeded(result).startswith(f"{tmp_path / 'ast.ingot'}: ast, fp32")
    assert "audio-classification (config: id2label with 3 names)" in result.stderr
    assert "ASTFeatureExtractor; values of 60 hard sounds: equal to the bit" in result.stderr
    assert "audio -> graph -> classify; answers of 50 sounds equal to transformers" in result.stderr
    variant = Archive.open(tmp_path / "ast.ingot").variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert (proof.items, proof.answers, proof.deviation) == (60, 50, 0)
    assert proof.error < 1e-5
    [golden, *_] = [case for case in variant.goldens() if case.raw]
    assert set(golden.answers) == {"label", "score", "seconds", "cut_seconds"}


@pytest.mark.matrix
def test_whispers_spectrogram_is_within_the_bound_that_was_measured(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", speech.whisper(tmp_path / "whisper"), "--out", tmp_path / "whisper.ingot")
    succeeded(result)
    proof = Archive.open(tmp_path / "whisper.ingot").variant().serving.evidence.steps
    assert proof is not None
    assert 0 < proof.deviation < 1e-3
    assert f"values of 60 hard sounds: equal within {proof.deviation:.0e}" in result.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("mask", [False, True])
def test_a_recognizer_answers_with_texts(run_ingot: RunIngot, tmp_path: Path, mask: bool) -> None:
    folder = speech.recognizer(tmp_path / "ctc", mask=mask)
    result = run_ingot("export", folder, "--out", tmp_path / "ctc.ingot")
    succeeded(result)
    assert "automatic-speech-recognition (config: Wav2Vec2ForCTC)" in result.stderr
    assert "audio -> graph -> ctc; answers of " in result.stderr
    variant = Archive.open(tmp_path / "ctc.ingot").variant()
    proof, steps = variant.serving.evidence.steps, variant.serving.steps
    assert proof is not None
    assert steps is not None
    assert proof.items == 60
    assert 40 <= proof.answers <= 50  # without those where rounding decides
    assert (proof.deviation, proof.error) == (0, 0)
    assert variant.serving.signature.batch == "batch"  # requests of equal lengths share a call
    [step], [ctc] = steps.model_dump()["before"], steps.model_dump()["after"]
    assert step["attention_mask"] == ("attention_mask" if mask else "")
    assert step["sizes"] == ctc["sizes"] == ("sizes" if mask else "")
    assert (step["rate"], step["least"]) == (16_000, 185)  # two frames
    assert ctc["convolutions"] == (((10, 5, 0), (8, 4, 0), (4, 4, 0)) if mask else ())
    assert ctc["tokens"] == tuple(speech.LETTERS)


@pytest.mark.matrix
def test_a_classifier_with_a_mask(run_ingot: RunIngot, tmp_path: Path) -> None:
    folder = speech.classifier(tmp_path / "dogs", mask=True)
    result = run_ingot("export", folder, "--out", tmp_path / "dogs.ingot")
    succeeded(result)
    serving = Archive.open(tmp_path / "dogs.ingot").variant().serving
    assert not serving.padding  # masks that hide parts in the middle have no meaning to the model
    proof = serving.evidence.steps
    assert proof is not None
    assert (proof.items, proof.answers, proof.deviation) == (60, 50, 0)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("HubertForSequenceClassification", "audio-classification"),
        ("WhisperForAudioClassification", "audio-classification"),
        ("WavLMForCTC", "automatic-speech-recognition"),
        ("BertForSequenceClassification", "text-classification"),
    ],
)
def test_the_task_follows_from_the_architecture(tmp_path: Path, architecture: str, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = tasks.find(tmp_path)
    assert found is not None
    assert found.task == task


def test_models_that_generate_text_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    assert tasks.find(tmp_path) is None
    with pytest.raises(InvalidArgument, match=r"WhisperForConditionalGeneration makes its text token by token.*--task"):
        tasks.find(tmp_path, "automatic-speech-recognition")
    with pytest.raises(InvalidArgument, match="task audio-classification needs a model that classifies sounds"):
        tasks.find(tmp_path, "audio-classification")


def test_a_folder_without_an_extractor_or_a_known_tokenizer(tmp_path: Path) -> None:
    import transformers

    folder = speech.recognizer(tmp_path / "ctc")
    module = transformers.Wav2Vec2ForCTC.from_pretrained(folder)
    found = tasks.find(folder)
    assert found is not None
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps({**words, "added_tokens": []}))
    with pytest.raises(Unsupported, match="makes texts of tokens in another way than Wav2Vec2CTCTokenizer"):
        found.describe(module)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(Unsupported, match="has no feature extractor"):
        found.describe(module)


def test_inputs_reach_from_two_frames_to_the_longest_sound(tmp_path: Path) -> None:
    import transformers

    folder = speech.recognizer(tmp_path / "ctc", mask=True)
    module = transformers.Wav2Vec2ForCTC.from_pretrained(folder)
    length = "batch,samples=185..960000"
    assert of(module).inputs == (f"input_values:float32[{length}]", f"attention_mask:int64[{length}]=0..1")


class Loudness(nn.Module):
    """Two logits of samples, of which it needs 400."""

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        level = input_values.abs().unfold(1, 400, 400).mean((1, 2))
        return torch.stack([level, 0.5 - level], 1)


def test_declared_steps_run_on_sounds_that_the_graph_accepts() -> None:
    steps = audio_classification(["loud", "low"], rate=16_000, operations=(Normalize(),))
    inputs = "input_values:float32[batch,samples=400..160000:400]"
    archive = export_model(Loudness(), inputs=inputs, output_names=["logits"], steps=steps, name="net")
    assert any(case.raw for case in archive.variant().goldens())


def test_sounds_are_not_padded_as_texts_are_if_they_have_no_steps(tmp_path: Path) -> None:
    found = tasks.find(speech.classifier(tmp_path / "net"))
    assert found is not None
    assert command._padding(found, None) == ()
