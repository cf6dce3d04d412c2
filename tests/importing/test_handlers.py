"""TorchServe's default handler of pictures, as steps that were proved equal to its own arithmetic."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import ingot
from ingot.errors import InvalidArgument
from ingot.importing import handlers
from ingot.model_store import Archive
from ingot.steps.images.pictures import drawn
from tests.importing.sources import mar
from tests.support import RunIngot

NAMES = {"0": "cat", "1": ["n01", "dog"], "2": "bird", "4": "é"}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 8, 32, stride=32)
    last = torch.nn.Linear(8 * 7 * 7, 7)
    return torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.Flatten(), last).eval()


def script(module: torch.nn.Module) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    pytest.importorskip("PIL")
    files = {"net.pt": script(net()), "index_to_name.json": json.dumps(NAMES).encode()}
    path = tmp_path_factory.mktemp("handlers") / "net.mar"
    mar(path, files, serializedFile="net.pt", handler="image_classifier")
    return ingot.import_model(path, allow_code=True)


@pytest.mark.matrix
def test_import_prints_the_steps_and_labels(tmp_path: Path, run_ingot: RunIngot) -> None:
    pytest.importorskip("PIL")
    files = {"net.pt": script(net()), "index_to_name.json": json.dumps(NAMES).encode()}
    mar(tmp_path / "net.mar", files, serializedFile="net.pt", handler="image_classifier")
    done = run_ingot("import", str(tmp_path / "net.mar"), "--allow-code", "--out", str(tmp_path / "net.ingot"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +task +image-classification$", done.stderr, re.MULTILINE)
    assert re.search(r"^ +steps +image -> graph -> classify$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^ +labels +7 by softmax: cat, dog, bird", done.stderr, re.MULTILINE), done.stderr
    assert "not imported" not in done.stderr


@pytest.mark.matrix
def test_the_handler_becomes_steps_with_a_proof(archive: Archive) -> None:
    variant = archive.variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert proof.reference.startswith("TorchServe's image_classifier with Pillow ")
    assert (proof.items, proof.deviation) == (60, 0)
    assert proof.answers == 24
    assert variant.serving.steps is not None
    assert variant.serving.steps.labels == ("cat", "dog", "bird", "3", "é", "5", "6")
    assert not any("handler" in note for note in variant.serving.provenance.notes)


@pytest.fixture(scope="module")
def url(archive: Archive) -> Iterator[str]:
    ports = {"http_port": 0, "grpc_port": 0, "torchserve": True, "torchserve_ports": "0,0,0,0,0"}
    with ingot.serve(archive, **ports) as server:  # type: ignore[arg-type]
        yield server.torchserve_urls["inference"]


@pytest.mark.matrix
def test_predictions_are_those_of_the_handler(url: str) -> None:
    """Of pictures in RGB, which are all that the handler accepts, turned by their EXIF data or not."""
    pictures = [*drawn(20, seed=7, least=24, modes=("RGB",))]
    assert len(pictures) == 20
    module = net()
    for picture in pictures:
        with torch.no_grad():
            scores = torch.softmax(module(handlers._transformed(picture)[None]), dim=1)[0]
        best, classes = torch.topk(scores, 5)
        wanted = {name_of(index): score for index, score in zip(classes.tolist(), best.tolist(), strict=True)}
        found = httpx.put(f"{url}/predictions/net", content=picture, trust_env=False, timeout=60).json()
        assert [*found] == [*wanted]
        assert found == pytest.approx(wanted, abs=1e-6)


def name_of(index: int) -> str:
    name: Any = NAMES.get(str(index), str(index))
    return str(name[-1] if isinstance(name, list) else name)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (None, ["0", "1", "2"]),
        (b'{"0": "a", "1": "b", "2": "c"}', ["a", "b", "c"]),
        (b'{"2": ["n2", "long", "c"]}', ["0", "1", "c"]),
        (b'{"object_type_names": ["a", "b"]}', ["a", "b", "2"]),
    ],
)
def test_the_forms_of_names(content: bytes | None, labels: list[str]) -> None:
    assert handlers.labels_of(content, 3) == labels


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"[", "is not JSON"), (b'["a"]', "must be an object"), (b'{"0": 1}', "must be texts"), (b'{"0": []}', "texts")],
)
def test_names_of_another_form(content: bytes, part: str) -> None:
    with pytest.raises(InvalidArgument, match=part):
        handlers.labels_of(content, 3)


@pytest.mark.parametrize(
    ("inputs", "part"),
    [("x:float32[batch,3,299,299]", "makes one input of the shape"), ("x:float32[batch,4]", "--without-handler")],
)
def test_a_model_that_the_handler_does_not_fit(tmp_path: Path, inputs: str, part: str) -> None:
    path = mar(tmp_path / "net.mar", {"net.pt": script(net())}, serializedFile="net.pt", handler="image_classifier")
    with pytest.raises(InvalidArgument, match=part):
        ingot.import_model(path, inputs=inputs, allow_code=True)
