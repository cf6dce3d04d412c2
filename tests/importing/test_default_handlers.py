"""TorchServe's default handlers, imported and served: answers equal those of the same calls, made here by hand."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch

import ingot
from ingot.errors import InvalidArgument
from ingot.importing import handlers
from ingot.steps.images.pictures import drawn
from tests.importing.sources import mar, torch_file

SEGMENTER = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = torch.nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x):
        return {"out": self.classes(x), "aux": self.classes(x).mean(1)}
"""
# As torchvision's detectors: a list of pictures of any size, or a batch, to a dictionary for each.
DETECTOR = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, images, targets=None):
        return [self.found(image) for image in images]

    def found(self, image):
        height, width = image.shape[1:]
        scores = (image.mean((1, 2)) * self.weight).sigmoid()
        boxes = torch.stack([image.new_tensor([0.0, each, width / 3, height - each]) for each in range(3)])
        best = scores.argsort(descending=True)
        return {"boxes": boxes[best], "labels": best + 1, "scores": scores[best]}
"""
TEXTS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(40, 8)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))
"""
TEXT = "The film isn't <b>bad</b> &amp; I'd've watched it again, naïve as cafés!"
# Made by the text_classifier of pytorch/serve 0.12 itself.
TOKENS = """the film is not bad i wouldve watched it again naive as cafes the_film film_is is_not not_bad bad_i
i_wouldve wouldve_watched watched_it it_again again_naive naive_as as_cafes"""
VOCABULARY = {token.replace("_", " "): number for number, token in enumerate([*TOKENS.split(), "<unk>"])}
NAMES = {"0": "other", "1": "cat", "2": ["n1", "dog"], "3": "bird"}


def module(code: str) -> torch.nn.Module:
    space: dict[str, Any] = {"__name__": "net"}
    exec(code, space)
    torch.manual_seed(0)
    made: torch.nn.Module = space["Net"]()
    return made.eval()


def saved(value: Any) -> bytes:
    torch.save(value, stream := io.BytesIO())
    return stream.getvalue()


def files(code: str, **more: bytes) -> dict[str, bytes]:
    return {"net.py": code.encode(), "net.pth": saved(module(code).state_dict()), **more}


def archive(folder: Path, handler: str, content: Mapping[str, bytes], **model: object) -> Path:
    named = {"serializedFile": "net.pth", "modelFile": "net.py", "modelName": handler, "handler": handler}
    return mar(folder / f"{handler}.mar", content, **{**named, **model})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("handlers")
    names = {"index_to_name.json": json.dumps(NAMES).encode()}
    made = {
        "image_segmenter": files(SEGMENTER),
        "object_detector": files(DETECTOR, **names),
        "text_classifier": files(TEXTS, **names, **{"source_vocab.pt": saved(VOCABULARY)}),
    }
    for name, content in made.items():
        ingot.import_model(archive(folder, name, content), allow_code=True).save(folder / f"{name}.ingot")
    with serving(*(folder / f"{name}.ingot" for name in made)) as client:
        yield client


@contextlib.contextmanager
def serving(*archives: Path) -> Iterator[httpx.Client]:
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "torchserve": True, "torchserve_ports": "0,0,0,0,0"}
    with (
        ingot.serve(*map(str, archives), allow_code=True, device="cpu", **ports) as server,
        httpx.Client(base_url=server.torchserve_urls["inference"], trust_env=False, timeout=60) as client,
    ):
        yield client


def pictures(count: int) -> list[bytes]:
    return [*drawn(count, seed=7, least=24, modes=("RGB",))]


@pytest.mark.matrix
def test_segments(served: httpx.Client) -> None:
    net = module(SEGMENTER)
    for picture in pictures(4):
        with torch.no_grad():
            scores = torch.softmax(net(handlers._transformed(picture)[None])["out"], dim=1)[0]
        answer = served.put("/predictions/image_segmenter", content=picture)
        found = np.array(answer.json(), np.float32)
        assert found.shape == (224, 224, 2)
        best, second = torch.topk(scores, 2, dim=0).values.numpy()
        np.testing.assert_allclose(found[..., 1], best, atol=1e-6)
        clear = best - second > 1e-6
        assert clear.mean() > 0.999
        assert (found[..., 0] == scores.argmax(0).numpy())[clear].all()


@pytest.mark.matrix
def test_segments_have_a_proof(tmp_path: Path) -> None:
    variant = ingot.import_model(archive(tmp_path, "image_segmenter", files(SEGMENTER)), allow_code=True).variant()
    proof, steps = variant.serving.evidence.steps, variant.serving.steps
    assert proof is not None
    assert steps is not None
    assert (proof.items, proof.deviation) == (60, 0)
    assert [step.kind for step in (*steps.before, *steps.after)] == ["image", "pixel_classes"]
    assert not any("handler" in note for note in variant.serving.provenance.notes)


@pytest.mark.matrix
def test_objects(served: httpx.Client) -> None:
    net = module(DETECTOR)
    for picture in pictures(4):
        pixels = np.array(PIL.Image.open(io.BytesIO(picture)))
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        [found] = net([image])
        names = {str(key): name[-1] if isinstance(name, list) else name for key, name in NAMES.items()}
        rows = zip(*(found[key].tolist() for key in ("boxes", "labels", "scores")), strict=True)
        wanted = [{names[str(label)]: box, "score": score} for box, label, score in rows if score >= 0.5]
        assert wanted
        answer = served.post("/predictions/object_detector", files={"data": ("a.png", picture)})
        assert answer.text == json.dumps(wanted, indent=2)


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["text", "file", "raw"])
def test_texts(served: httpx.Client, form: str) -> None:
    content = TEXT.encode()
    forms: dict[str, dict[str, Any]] = {
        "text": {"content": content, "headers": {"content-type": "text/plain"}},
        "file": {"files": {"data": ("a.txt", content)}},
        "raw": {"content": content},
    }
    numbers = torch.arange(len(TOKENS.split()))
    with torch.inference_mode():
        scores = torch.softmax(module(TEXTS)(numbers, torch.tensor([0])), dim=1)[0].tolist()
    wanted = dict(zip(("other", "cat", "dog"), scores, strict=True))
    answer = served.post("/predictions/text_classifier", **forms[form])
    assert answer.text == json.dumps(wanted, indent=2)


@pytest.mark.matrix
def test_words_that_the_vocabulary_lacks(served: httpx.Client) -> None:
    answer = served.post("/predictions/text_classifier", content=b"unheard")
    with torch.inference_mode():
        scores = torch.softmax(module(TEXTS)(torch.tensor([VOCABULARY["<unk>"]]), torch.tensor([0])), dim=1)[0].tolist()
    assert answer.text == json.dumps(dict(zip(("other", "cat", "dog"), scores, strict=True)), indent=2)


@pytest.mark.matrix
def test_a_dictionary_without_a_number_for_other_words_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, "text_classifier", files(TEXTS, **{"source_vocab.pt": saved({"film": 1})}))
    with pytest.raises(InvalidArgument, match=r"source_vocab.pt is a dictionary without '<unk>'"):
        ingot.import_model(path, allow_code=True)


@pytest.mark.matrix
def test_a_classifier_that_cannot_become_steps_runs_as_it_is(tmp_path: Path) -> None:
    """A module whose Python depends on values cannot be captured."""
    code = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 6)

    def forward(self, x):
        found = self.layer(x.mean((2, 3)))
        return torch.tensor([[each * 2 for each in row] for row in found.tolist()])
"""
    path = archive(tmp_path, "image_classifier", files(code))
    archived = ingot.import_model(path, allow_code=True)
    variant = archived.variant()
    assert variant.serving.format == "python"
    [why, *_] = variant.serving.provenance.notes
    assert "the handler image_classifier runs as it is, in Python, as it does not become steps: " in why
    archived.save(tmp_path / "net.ingot")
    with serving(tmp_path / "net.ingot") as client:
        [picture] = pictures(1)
        with torch.no_grad():
            scores = torch.softmax(module(code)(handlers._transformed(picture)[None]), dim=1)
        best, classes = torch.topk(scores, 5, dim=1)
        wanted = dict(zip(map(str, classes[0].tolist()), best[0].tolist(), strict=True))
        assert client.put("/predictions/image_classifier", content=picture).text == json.dumps(wanted, indent=2)


@pytest.mark.parametrize(
    ("handler", "more", "message"),
    [
        ("text_classifier", {}, "the manifest names 'source_vocab.pt', which is not in the archive"),
        ("object_detector", {"serializedFile": None, "modelFile": None}, "names no model"),
    ],
)
def test_what_a_handler_needs_is_named(tmp_path: Path, handler: str, more: dict[str, Any], message: str) -> None:
    content = {"net.py": b"", "net.pth": torch_file("net/data.pkl", "net/version")}
    with pytest.raises(InvalidArgument, match=message):
        ingot.import_model(archive(tmp_path, handler, content, **more), allow_code=True)


def test_a_pickled_vocabulary_needs_consent(tmp_path: Path) -> None:
    path = archive(tmp_path, "text_classifier", {"source_vocab.pt": b""})
    with pytest.raises(InvalidArgument, match=r"'text_classifier': source_vocab.pt, a pickle, .* --allow-code.*also, "):
        ingot.import_model(path)
