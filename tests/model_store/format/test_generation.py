"""The declaration of a decoder, as an archive may state it."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from pydantic import ValidationError

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store import Archive, BlobFolder, Generation, Golden, Serving, add_variant
from ingot.model_store.diff import diff, view
from ingot.model_store.format import manifest
from ingot.tensors import Array
from tests.model_store.samples import serving

GENERATION = Generation(layers=2, kv_heads=1, head_size=8, max_length=64, vocab=32, eos=(2,), tokenizer="t.json")


def test_the_interface_follows_from_the_declaration() -> None:
    signature = GENERATION.signature
    assert [spec.name for spec in signature.inputs[:4]] == ["input_ids", "position_ids", "lengths", "total"]
    assert str(signature.inputs[-1]) == "past_key_values.1.value:float32[rows,1,capacity,8]"
    assert signature.outputs[0].shape == ("rows", 32)
    assert GENERATION.cache_bytes == 2 * 2 * 8 * 4
    GENERATION.check(signature)


def test_a_graph_of_another_form_is_refused() -> None:
    signature = GENERATION.signature
    with pytest.raises(InvalidArgument, match=r"differ in past_key_values\.0\.key"):
        GENERATION.check(dataclasses.replace(signature, inputs=signature.inputs[:4] + signature.inputs[5:]))
    odd = decoder(GENERATION.model_copy(update={"layers": 1}))
    with pytest.raises(InvalidArchive, match=r"differ in past_key_values\.1"):
        manifest.decode(manifest.Serving, manifest.encode(odd), "serving.json")


def decoder(generation: Generation = GENERATION) -> Serving:
    return serving(signature=GENERATION.signature).model_copy(update={"generation": generation})


def archive(golden: Golden, generation: Generation = GENERATION) -> Archive:
    blobs = BlobFolder.scratch()
    graph = blobs.put(b"graph", manifest.WEIGHT)
    files = {"t.json": b"{}"}
    return Archive.create(blobs, [add_variant(blobs, decoder(generation), graph, (), [golden], None, files)])


def test_an_archive_has_the_tokenizer_and_golden_tokens() -> None:
    tokens = np.arange(3)
    found = archive(Golden({"prompt": tokens}, {"tokens": tokens})).variant()
    assert found.serving.generation == GENERATION
    assert found.step_files() == {"t.json": b"{}"}
    np.testing.assert_array_equal(found.goldens()[0].outputs["tokens"], tokens)


@pytest.mark.parametrize(
    "wrong", [{"x": np.arange(3)}, {"prompt": np.ones(3, np.float32)}, {"prompt": np.ones((1, 3))}]
)
def test_goldens_of_other_models_are_refused(wrong: dict[str, Array]) -> None:
    with pytest.raises(InvalidArchive, match="a prompt and its tokens"):
        archive(Golden(wrong, {"tokens": np.arange(3)})).variant().goldens()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 12}, "multiple of 8"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"eos": (32,)}, "token 32 is a special token, but the model has 32 tokens"),
        ({"form": "other"}, "'gqa'"),
        ({"defaults": {"temperature": 0}}, "greater than 0"),
    ],
)
def test_values_that_no_decoder_has_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Generation.model_validate({**GENERATION.model_dump(), **change})


def test_two_decoders_differ_in_tokens_and_declaration() -> None:
    prompt, tokens = {"prompt": np.arange(3)}, np.arange(4)
    other = GENERATION.model_copy(update={"eos": (2, 3), "chat_template": "{{ a }}\n{{ b }}"})
    before, after = archive(Golden(prompt, {"tokens": tokens})), archive(Golden(prompt, {"tokens": tokens[:2]}), other)
    shown = view.text(diff(before, after))
    assert re.search(r"generation\.eos +\[2\] +\[2, 3\]", shown)
    assert "generation.chat_template" in shown
    assert re.search(r"tokens +not equal", shown)
