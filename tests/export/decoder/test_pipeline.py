"""The export of decoders: the graph, what the archive declares, and what a user reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.model_store import Archive
from tests.export.decoder import tiny
from tests.support import RunIngot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoders") / "tiny-llama"
    tiny.save(path, num_key_value_heads=2)
    return path


def test_a_folder_becomes_an_archive_with_a_proof(run_ingot: RunIngot, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.ingot"
    result = run_ingot("export", folder, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "2 layers x 2 heads x 8, one buffer a slot; GroupQueryAttention, per-row lengths" in result.stderr
    assert "16 prompts, greedy: 512 tokens equal to generate()'s; nearest runner-up" in result.stderr
    variant = Archive.open(out).variant()
    generation, tokens = variant.serving.generation, variant.serving.evidence.tokens
    assert generation is not None
    assert tokens is not None
    assert (generation.eos, generation.max_length, generation.tokenizer) == ((0,), 128, "tokenizer.json")
    assert "add_generation_prompt" in generation.chat_template
    assert generation.special["eos_token"] == "<|end|>"
    assert (tokens.tokens, tokens.ties, tokens.longest) == (512, (), 96)
    assert tokens.gap > 0.01
    shown = run_ingot("inspect", out).stdout
    assert "512 tokens equal to generate()'s" in shown
    assert "past_key_values" not in shown
