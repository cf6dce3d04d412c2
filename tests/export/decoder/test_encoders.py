"""The export of encoder-decoders: tokens equal to ``generate()``'s, the rules of its settings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ingot.errors import InvalidArchive, ParityError, Unsupported
from ingot.export.decoder import encoders
from ingot.export.decoder.attention import Source
from ingot.export.decoder.pipeline import export_decoder
from ingot.model_store import Archive, Generation
from ingot.model_store.format.generation import Encoder
from tests.export.decoder import tiny
from tests.support import RunIngot

RULES: dict[str, Any] = {
    "no_repeat_ngram_size": 2,
    "min_length": 12,
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [7],
    "forced_bos_token_id": 9,
    "forced_eos_token_id": 0,
    "bad_words_ids": [[8], [0]],
}
FAMILIES = ("bart", "blenderbot-small", "marian", "mbart", "mt5", "pegasus", "t5")


def saved(folder: Path, family: str = "t5", **settings: Any) -> Path:
    """Write an encoder-decoder with these settings in its generation_config."""
    model = tiny.save_encoder_decoder(folder, family, tokenizer=False)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "t5" else pytest.mark.matrix) for name in FAMILIES]
)
def test_tokens_of_each_family_are_those_of_generate(family: str, tmp_path: Path) -> None:
    serving = export_decoder(saved(tmp_path / family, family, no_repeat_ngram_size=2)).variant().serving
    tokens = serving.evidence.tokens
    assert tokens is not None
    assert tokens.tokens > 100
    assert not tokens.ties
    assert tokens.rows_error <= 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_that_of_generate(name: str, tmp_path: Path) -> None:
    variant = export_decoder(saved(tmp_path / "net", "bart", **{name: RULES[name]})).variant()
    tokens, plain = variant.serving.evidence.tokens, tmp_path / "plain"
    assert tokens is not None
    assert not tokens.ties
    other = export_decoder(saved(plain, "bart")).variant()
    assert variant.serving.generation is not None
    assert variant.serving.generation.rules != other.serving.generation.rules  # type: ignore[union-attr]


@pytest.mark.matrix
def test_all_rules_together_are_those_of_generate(tmp_path: Path) -> None:
    serving = export_decoder(saved(tmp_path / "net", "bart", **RULES)).variant().serving
    assert serving.generation is not None
    assert serving.evidence.tokens is not None
    assert serving.evidence.tokens.tokens > 100
    rules = serving.generation.rules
    assert (rules.begin, rules.last, rules.suppress) == (((9,),), 0, (5, 6, 8))
    assert (rules.begin_suppress, rules.min_tokens, rules.no_repeat) == ((7,), 11, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("wrong", ["scale", "bias"])
def test_a_graph_with_another_attention_is_refused(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, bias = Source.attend, encoders._bias
    if wrong == "scale":
        monkeypatch.setattr(Source, "attend", lambda self, q, k, v, scale: attend(self, q, k, v, scale * 1.01))
    else:
        monkeypatch.setattr(encoders, "_bias", lambda part, positions, total: bias(part, positions + 1, total))
    with pytest.raises(ParityError, match="the logits depart from the original's by"):
        export_decoder(saved(tmp_path / "net"))


def test_beams_are_served_greedily_only_if_the_user_says_so(run_ingot: RunIngot, tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "net", "bart", num_beams=4), tmp_path / "m.ingot"
    refused = run_ingot("export", folder, "--out", out)
    assert refused.returncode == 1
    assert "generation_config has a beam search (num_beams 4)" in refused.stderr
    assert "give --greedy" in refused.stderr
    made = run_ingot("export", folder, "--out", out, "--greedy")
    assert made.returncode == 0, made.stderr
    assert "reads up to 128 tokens once for each answer" in made.stderr
    generation = Archive.open(out).variant().serving.generation
    assert generation is not None
    assert generation.task == "text2text-generation"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size"),
        ({"bad_words_ids": [[3, 4]]}, "bad_words_ids of several tokens"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
    ],
)
def test_a_setting_that_servers_lack_is_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "net", "bart", **settings)
    with pytest.raises(Unsupported, match=f"generation_config sets {named}, which servers do not do"):
        export_decoder(folder)


def test_greedy_is_for_encoder_decoders(run_ingot: RunIngot, tmp_path: Path) -> None:
    tiny.save(tmp_path / "net", tokenizer=False)
    result = run_ingot("export", tmp_path / "net", "--out", tmp_path / "m.ingot", "--greedy")
    assert result.returncode == 1
    assert "--greedy is for encoder-decoders" in result.stderr


def test_an_encoder_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    variant = export_decoder(saved(tmp_path / "net")).variant()
    found = variant.serving.generation
    assert found is not None
    assert found.encoder is not None
    stranger = found.model_copy(update={"encoder": found.encoder.model_copy(update={"blob": "0" * 64})})
    serving = variant.serving.model_copy(update={"generation": stranger})
    with pytest.raises(InvalidArchive, match="has its encoder in a blob that is not its own: 0000"):
        list(type(variant)(serving, variant.manifest, variant.descriptor, variant.blobs).graphs())
    with pytest.raises(ValidationError, match="token 96 is a special token"):
        Generation.model_validate({**found.model_dump(), "encoder": Encoder(max_length=8, start=(96,))})
