"""The export of decoders: the graph, what the archive declares, and what a user reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from ingot.errors import ParityError, Unsupported
from ingot.export.decoder import proof
from ingot.export.decoder.attention import Slots
from ingot.export.decoder.pipeline import export_decoder
from ingot.export.decoder.rows import Answer
from ingot.export.decoder.rules import unapplied
from ingot.model_store import Archive
from tests.export.decoder import tiny
from tests.support import RunIngot


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoders") / "tiny-llama"
    tiny.save(path, num_key_value_heads=2)
    return path


@pytest.fixture(scope="module")
def archive(folder: Path) -> Path:
    out = folder.parent / "tiny.ingot"
    export_decoder(folder).save(out)
    return out


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
    assert tokens.gap > 1e-3
    shown = run_ingot("inspect", out).stdout
    assert "512 tokens equal to generate()'s" in shown
    assert "past_key_values" not in shown


GROUPED = {"num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ROTARY = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 4, "long_factor": [4.0] * 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "arcee": GROUPED,
    "cohere": GROUPED,
    "cohere2": {**GROUPED, "sliding_window": 8},
    "ernie4_5": GROUPED,
    "exaone4": {**GROUPED, "sliding_window": 8},
    "gemma": HEADS,
    "gemma2": {**HEADS, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**HEADS, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    "glm": HEADS,
    "glm4": HEADS,
    "gpt2": {**GPT, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {**GROUPED, "attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "hunyuan_v1_dense": HEADS,
    "ministral": {**HEADS, "sliding_window": 8},
    "mistral": {**GROUPED, "sliding_window": 8},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, "sliding_window": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {**GROUPED, "partial_rotary_factor": 0.5},
    "phi3": GROUPED,
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": HEADS,
    "seed_oss": HEADS,
    "smollm3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("gemma2", "gpt2") else pytest.mark.matrix) for name in FAMILIES],
)
def test_tokens_of_each_family_are_those_of_generate(family: str, tmp_path: Path) -> None:
    tiny.save(tmp_path / family, family, tokenizer=False, **{"tie_word_embeddings": False, **FAMILIES[family]})
    serving = export_decoder(tmp_path / family).variant().serving
    tokens = serving.evidence.tokens
    assert tokens is not None
    assert tokens.tokens > 100
    assert not tokens.ties
    assert tokens.gap > 50 * serving.evidence.parity[0].error  # which is relative to the largest logit


@pytest.mark.matrix
@pytest.mark.parametrize("wrong", ["scale", "softcap", "window"])
def test_a_graph_with_another_attention_is_refused(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tmp_path / "net", "gemma2", tokenizer=False, **FAMILIES["gemma2"])
    right = Slots.attend

    def attend(self: Slots, q: Any, k: Any, v: Any, scale: float, softcap: float, window: int, *bias: Any) -> Any:
        scale *= 1.01 if wrong == "scale" else 1
        softcap *= 1.1 if wrong == "softcap" else 1
        return right(self, q, k, v, scale, softcap, window + 1 if window and wrong == "window" else window, *bias)

    monkeypatch.setattr(Slots, "attend", attend)
    with pytest.raises(ParityError, match="the logits depart from the original's by"):
        export_decoder(tmp_path / "net")


def test_settings_of_a_decoder_that_servers_do_not_apply_are_noted() -> None:
    made: Any = GenerationConfig
    config = made(num_beams=1, num_beam_groups=2, stop_strings=["."], guidance_scale=2.0, min_new_tokens=3)
    assert unapplied(config, rules=False) == ["guidance_scale", "stop_strings", "min_new_tokens"]
    assert unapplied(config, rules=True) == ["guidance_scale", "stop_strings"]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "its attention is not called through transformers' attention interface"),
        ("llama", {**GROUPED, "head_dim": 12}, "its heads have 12 elements, which is not a multiple of 8"),
        ("mamba", {"state_size": 4}, "its positions are not an input"),
        ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}, "its layers keep a state besides keys"),
        ("llama4_text", {**HEADS, "num_local_experts": 2}, "its layers attend to chunks of a text"),
        ("gpt_oss", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}, "it has attention sinks"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    name = type(tiny.save(tmp_path / "net", family, tokenizer=False, **changes)).__name__
    with pytest.raises(Unsupported) as found:
        export_decoder(tmp_path / "net")
    assert str(found.value).startswith(f"{name} cannot be exported as a decoder with a cache: {reason}")
    assert str(found.value).endswith("export its graph without a cache (--task none)")


@pytest.mark.matrix
def test_rotary_factors_by_length_limit_the_graph(tmp_path: Path) -> None:
    changes = {"original_max_position_embeddings": 64, "rope_parameters": ROTARY, "tie_word_embeddings": True}
    tiny.save(tmp_path / "net", "phi3", tokenizer=False, **GROUPED, **changes)
    serving = export_decoder(tmp_path / "net").variant().serving
    assert serving.generation is not None
    assert serving.generation.max_length == 64
    assert any("the graph is for 64 tokens instead of 128" in note for note in serving.provenance.notes)


@pytest.mark.matrix
def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "net", tie_word_embeddings=True, hidden_size=1024, intermediate_size=8)
    size = sum(weight.nbytes for weight in model.parameters())
    variant = export_decoder(tmp_path / "net").variant()
    assert size <= variant.size < size * 1.05


@pytest.mark.parametrize("command", ["profile", "compare"])
def test_commands_for_models_that_answer_in_one_call_refuse_a_decoder(
    run_ingot: RunIngot, archive: Path, tmp_path: Path, command: str
) -> None:
    others = {"compare": (archive,)}
    result = run_ingot(command, archive, *others.get(command, ()))
    assert result.returncode == 1, result.stderr
    assert f"'tiny-llama' generates its answers token by token; ingot {command} is for models" in result.stderr


def test_the_goldens_are_replayed(run_ingot: RunIngot, archive: Path) -> None:
    result = run_ingot("inspect", archive, "--replay")
    assert "replay  fp32: golden cases: 3" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        (("--task", "text-generation", "--opset", "20"), "a decoder with its cache is exported with --out, --name"),
        (("--task", "text-classification"), "needs a model ...ForSequenceClassification"),
    ],
)
def test_options_that_a_decoder_lacks_are_refused(
    run_ingot: RunIngot, folder: Path, tmp_path: Path, options: tuple[str, ...], remark: str
) -> None:
    result = run_ingot("export", folder, "--out", tmp_path / "m.ingot", *options)
    assert result.returncode == 1
    assert remark in result.stderr


def test_a_near_tie_is_named_and_a_clear_difference_is_refused() -> None:
    logits = np.array([[0, 1, 3], [4, 4.0001, 0]], np.float32)
    answer = Answer(np.arange(5), np.array([2, 1]), logits)
    tied = proof.compared([answer], [[2, 0]], 0.0)
    assert tied.tokens == 1
    assert tied.ties[0].startswith("token 1 after a prompt of 5 is 0, and 1 by generate()")
    with pytest.raises(ParityError, match="token 0 after a prompt of 5 is 1, and 2 by generate"):
        proof.compared([answer], [[1, 0]], 0.0)
    assert [golden.outputs["tokens"].tolist() for golden in proof.goldens([answer])] == [[2]]
