"""Archives whose steps contradict themselves, or ask for absurd amounts of work or memory: loading refuses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

import ingot
from ingot import Client
from ingot.errors import IngotError, InternalError, InvalidArchive, InvalidArgument
from ingot.model_store import Archive, BlobFolder
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import manifest
from ingot.steps import audio_classification, tokenizer
from tests.server import test_apis, test_image_steps, test_sound_steps, test_steps
from tests.steps.bert import tokenizer_file

Change = Callable[[dict[str, Any]], object]


def changed(archive: Archive, change: Change) -> Archive:
    """Return an archive whose steps in ``serving.json`` are changed, with digests that are right."""
    blobs, variant = BlobFolder.scratch(), archive.variant()
    archive.copy_to(blobs)
    layer = variant.manifest.layer(manifest.SERVING)
    assert layer is not None
    document = json.loads(read(blobs, layer))
    change(document["steps"])
    new = blobs.put(json.dumps(document).encode(), manifest.SERVING, {manifest.FILEPATH: "serving.json"})
    layers = tuple(new if each.media_type == manifest.SERVING else each for each in variant.manifest.layers)
    whole = manifest.encode(variant.manifest.model_copy(update={"layers": layers}))
    return Archive.create(blobs, [blobs.put(whole, manifest.MANIFEST, {manifest.VARIANT: "fp32"})])


def serve(archive: Archive, folder: Path) -> None:
    archive.save(folder / "hostile.ingot")
    with ingot.serve(str(folder / "hostile.ingot"), http_port=0, grpc_port=0):
        pass


def first(steps: dict[str, Any], **fields: Any) -> None:
    """Change the first step."""
    steps["before"][0].update(fields)


def operation(index: int, **fields: Any) -> Change:
    return lambda steps: steps["before"][0]["operations"][index].update(fields)


CROP = {"operation": "center_crop", "height": 1e9, "width": 1e9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (operation(0, height=10**9), "resize.height': Input should be less than or equal to"),
        (operation(0, width=-5), "resize.width': Input should be greater than or equal to 0"),
        (operation(0, multiple=10**12), "resize.multiple': Input should be less than or equal to"),
        (operation(1, factor=float("nan")), "rescale.factor': Input should be a finite number"),
        (operation(2, std=[1, 0, 1]), "normalize.std': .*the deviation of a channel is 0"),
        (lambda steps: steps["before"][0]["operations"].insert(1, CROP), "center_crop.height': Input should be less"),
        (lambda steps: first(steps, limits={"pixels": 1 << 60}), "limits.pixels': Input should be less than or equal"),
        (lambda steps: steps.update(before=steps["before"] * 5000), "should have at most 16 items"),
        (lambda steps: steps.update(outputs=steps["outputs"] * 100), "should have at most 64 items"),
    ],
)
def test_operations(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match=message):
        serve(changed(test_image_steps.make(tmp_path), change), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: first(steps, file="nothing.json"), "lacks the file 'nothing.json', which its steps need"),
        (lambda steps: first(steps, max_length=2), "max_length of step 'tokenize' is 2"),
        (lambda steps: first(steps, max_length=1 << 40), "max_length': Input should be less than or equal to"),
        (lambda steps: first(steps, code="import os"), "step 'tokenize' has no field 'code'"),
        (lambda steps: first(steps, kind="run"), "'run' found using 'kind' does not match any of the expected tags"),
        (lambda steps: steps["inputs"][0].update(name="words"), "step 'tokenize' needs 'text', which is not among"),
        (lambda steps: steps["after"][0].update(labels=["A", "B", "C"]), "3 labels, but 'logits' has 2 classes"),
        (lambda steps: steps["after"][0].update(labels=["a label"] * 1_000_000), "over the 4 MiB limit"),
        (lambda steps: first(steps, max_characters=1 << 40), "max_characters': Input should be less than or equal to"),
        (lambda steps: first(steps, prompts={"a": "a" * 20_000}), "String should have at most 10000 characters"),
        (lambda steps: steps.update(max_items=1 << 40), "max_items': Input should be less than or equal to"),
        (lambda steps: first(steps, pad_type=10**18), "pad_type': Input should be less than"),
        (lambda steps: steps.update(optional=["text_pair", "more"]), "optional names 'more', which is not an input"),
        (lambda steps: steps["inputs"].append(steps["inputs"][0]), "occurs twice in the steps' inputs: text"),
        (lambda steps: steps["outputs"].append(steps["outputs"][0]), "occurs twice in the steps' outputs: label"),
        (lambda steps: first(steps, text="text_pair", pair="text"), "'tokenize' needs 'text_pair', which requests may"),
        (lambda steps: steps["after"][0].update(logits="nothing"), "step 'classify' needs 'nothing', which is not"),
    ],
)  # fmt: skip
def test_texts(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidArchive, InvalidArgument), match=message):
        serve(changed(test_steps.make(tmp_path), change), tmp_path)


def test_a_mode_of_pooling_that_repeats(tmp_path: Path) -> None:
    with pytest.raises(InvalidArchive, match="a mode occurs twice; name each once"):
        changed(test_apis.table(tmp_path), lambda steps: steps["after"][0].update(modes=["mean"] * 5000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: steps["after"][0].update(modes=["mean", "max"]), r"'embedding:float32\[batch,8\]', but .*,4\]'"),
        (lambda steps: steps["outputs"][0].update(shape=["batch"]), r"declared as 'embedding:float32\[batch\]'"),
        (lambda steps: steps["outputs"][0].update(dtype="FP16"), "declared as 'embedding:float16"),
    ],
)  # fmt: skip
def test_vectors_that_are_not_as_declared_are_refused_at_load(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidArchive, InvalidArgument), match=message):
        serve(changed(test_apis.table(tmp_path), change), tmp_path)


def test_edited_steps_are_blamed_for_their_answers(tmp_path: Path) -> None:
    edited = changed(test_steps.make(tmp_path), lambda steps: steps["after"][0].update(function="sigmoid"))
    with pytest.raises(
        InternalError, match=r"the steps after golden case 0 .*; the steps, or the packages that run them"
    ):
        serve(edited, tmp_path)


@pytest.mark.parametrize("declared", [{"dtype": "INT32"}, {"shape": ["batch", 7]}, {"shape": ["batch"]}])
def test_answers_that_are_not_as_declared(declared: dict[str, Any], tmp_path: Path) -> None:
    """A client would read the floats of a score as whole numbers."""
    hostile = changed(test_steps.make(tmp_path), lambda steps: steps["outputs"][1].update(declared))
    with pytest.raises(IngotError, match=r"the answer 'score' is FP32 of shape \[\d+, 2\], but the archive declares"):
        serve(hostile, tmp_path)


def test_a_task_that_the_steps_do_not_have(tmp_path: Path) -> None:
    changed(test_steps.make(tmp_path), lambda steps: steps.update(task="fill-mask")).save(tmp_path / "length.ingot")
    with ingot.serve(str(tmp_path / "length.ingot"), http_port=0, grpc_port=0) as running:
        answer = httpx.post(f"{running.http_url}/models/length", json={"inputs": "a"})
    assert answer.status_code == 400
    assert "whose task is fill-mask, but whose steps have no 'fill'" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: first(steps, least=10**12), "audio.least': Input should be less than or equal to"),
        (lambda steps: first(steps, rate=10**9), "audio.rate': Input should be less than or equal to"),
        (lambda steps: first(steps, limits={"seconds": 1e12}), "limits.seconds': Input should be less than or equal"),
        (
            lambda steps: first(steps, operations=[{"operation": "fit", "size": 10**12}]),
            "fit.size': Input should be less than or equal to",
        ),
    ],
)
def test_sounds(change: Change, message: str, tmp_path: Path) -> None:
    described = audio_classification(test_sound_steps.LEVELS, rate=test_sound_steps.RATE)
    path = test_sound_steps.make("level", described, tmp_path, test_sound_steps.sound(0.5))
    with pytest.raises(InvalidArchive, match=message):
        serve(changed(Archive.open(path), change), tmp_path)


def test_a_huge_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_LARGEST", 1 << 20)
    huge = tokenizer_file() + b" " * (2 << 20)
    with pytest.raises(InvalidArchive, match=r"the tokenizer 'tokenizer\.json' has 2 MiB; the most are 1"):
        serve(test_steps.make(tmp_path, tokenizer=huge), tmp_path)


def replaces(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LETTERS = replaces({"String": "a"}, "a" * 100)
BYTES = {"type": "ByteLevel"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([LETTERS] * 4, r"the normalizer of 'tokenizer\.json' may make 1e\+08 characters of one, most by Replace"),
        ([{"type": "Sequence", "normalizers": [LETTERS] * 2}], "for texts of 100000 characters the most are 41.9"),
        ([replaces({"Regex": "b*"}, "a" * 300)], "may make 301 characters of one"),
        ([{"type": "Prepend", "prepend": "a" * 300}], "most by Prepend a"),
        ([BYTES] * 20, "most by ByteLevel"),
        ([replaces({"String": "a"}, "\ufdfa"), {"type": "NFKC"}], "may make 324 characters"),
    ],
)
def test_a_normalizer_that_makes_long_texts_of_letters(
    parts: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    """The package ends the process where memory ends."""
    grown = {**json.loads(tokenizer_file()), "normalizer": {"type": "Sequence", "normalizers": parts}}
    hostile = test_steps.make(tmp_path, tokenizer=json.dumps(grown).encode(), tested=False)
    with pytest.raises(InvalidArchive, match=message):
        serve(changed(hostile, lambda steps: first(steps, max_characters=100_000)), tmp_path)


@pytest.mark.parametrize("kind", ["single", "pair"])
def test_a_post_processor_that_repeats_a_text(kind: str, tmp_path: Path) -> None:
    """The package cuts each text before it is repeated, so rows are longer than ``max_length``."""
    repeated = json.loads(tokenizer_file())
    template = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if kind == "pair" else "$A $A $A",
        pair="[CLS] $A $B $B [SEP]" if kind == "pair" else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    repeated["post_processor"] = json.loads(template.__getstate__())
    with pytest.raises(InvalidArchive, match="its post-processor repeats a text"):
        serve(test_steps.make(tmp_path, tokenizer=json.dumps(repeated).encode(), tested=False), tmp_path)


def test_a_decoder_that_makes_long_texts_of_letters(tmp_path: Path) -> None:
    grown = {**json.loads(tokenizer_file()), "decoder": {"type": "Sequence", "decoders": [LETTERS] * 4}}
    with pytest.raises(InvalidArchive, match=r"the decoder of .* may make"):
        serve(test_steps.make(tmp_path, tokenizer=json.dumps(grown).encode(), tested=False), tmp_path)


def test_an_expression_that_backtracks_without_end(tmp_path: Path) -> None:
    """The package gives up after some tries: the text is refused, as a golden when the archive is loaded."""
    slow = json.loads(tokenizer_file())
    pattern = {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}
    slow["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = json.dumps(slow).encode()
    hostile = test_steps.make(tmp_path, tokenizer=tokenizer, golden=["a" * 60])
    with pytest.raises(InvalidArchive, match=r"steps refuse its own raw golden case 0: .* cannot encode input 'text'"):
        serve(hostile, tmp_path)
    test_steps.make(tmp_path, tokenizer=tokenizer, tested=False).save(tmp_path / "untested.ingot")
    with (
        ingot.serve(str(tmp_path / "untested.ingot"), http_port=0, grpc_port=0) as running,
        Client(running.http_url) as client,
    ):
        with pytest.raises(InvalidArgument, match="cannot encode input 'text'; send another text"):
            client.infer("length", {"text": test_steps.texts("a" * 60)})
        assert len(client.infer("length", {"text": test_steps.texts("fine")})["label"]) == 1
