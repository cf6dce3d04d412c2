"""Folders of classifiers of pictures: steps that are proved against transformers' processor and pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.export import tasks
from ingot.model_store import Archive
from tests.support import RunIngot, succeeded


def save(folder: Path) -> Path:
    """Save a small ViT of random weights, with a processor that leaves fields to its class."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        initializer_range=0.5,
        id2label={0: "cat", 1: "dog", 2: "ship"},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.matrix
def test_a_classifier_answers_with_labels(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", save(tmp_path / "vit"), "--out", tmp_path / "vit.ingot")
    assert succeeded(result).startswith(f"{tmp_path / 'vit.ingot'}: vit, fp32")
    assert "image-classification (config: id2label with 3 names)" in result.stderr
    assert "ViTImageProcessorPil; values of 60 hard pictures: equal to the bit" in result.stderr
    assert "image -> graph -> classify; answers of 50 pictures equal to transformers" in result.stderr
    variant = Archive.open(tmp_path / "vit.ingot").variant()
    proof, steps = variant.serving.evidence.steps, variant.serving.steps
    assert proof is not None
    assert steps is not None
    assert (proof.items, proof.answers) == (60, 50)
    assert proof.error < 1e-5
    [resize, rescale, normalize] = steps.model_dump()["before"][0]["operations"]
    assert (resize["height"], resize["filter"]) == (16, "bicubic")
    assert rescale["factor"] == 1 / 255
    assert normalize["mean"] == (0.5, 0.5, 0.5)  # of the class
    [golden, *_] = [case for case in variant.goldens() if case.raw]
    assert set(golden.answers) == {"label", "score"}
    assert np.allclose(golden.answers["score"].sum(1), 1)


@pytest.mark.matrix
def test_a_classifier_that_reads_numbers_of_colours(run_ingot: RunIngot, tmp_path: Path) -> None:
    import torch
    from transformers import ImageGPTConfig, ImageGPTForImageClassification, ImageGPTImageProcessorPil

    torch.manual_seed(0)
    config = ImageGPTConfig(vocab_size=17, n_positions=36, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    ImageGPTForImageClassification(config).save_pretrained(tmp_path / "gpt")
    clusters = np.random.default_rng(0).uniform(-1, 1, (16, 3)).tolist()
    ImageGPTImageProcessorPil(clusters, size={"height": 6, "width": 6}).save_pretrained(tmp_path / "gpt")
    result = run_ingot("export", tmp_path / "gpt", "--out", tmp_path / "gpt.ingot")
    assert succeeded(result).startswith(f"{tmp_path / 'gpt.ingot'}: gpt, fp32")
    assert "ImageGPTImageProcessorPil; values of 60 hard pictures: equal to the bit" in result.stderr
    assert "image -> graph -> classify; answers of 50 pictures equal to transformers" in result.stderr


def test_a_folder_needs_a_classifier_and_its_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTForImageClassification"]}))
    assert tasks.find(tmp_path) is None
    with pytest.raises(InvalidArgument, match=r"task image-classification needs .* and preprocessor_config.json"):
        tasks.find(tmp_path, "image-classification")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    found = tasks.find(tmp_path)
    assert found is not None
    assert found.task == "image-classification"
