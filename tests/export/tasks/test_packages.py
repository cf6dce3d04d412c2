"""Models of other packages from raw files: answers as those of the packages, which are installed in an environment."""

from __future__ import annotations

import bz2
import inspect
import io
import json
import lzma
import random
import sqlite3
import string
import subprocess
import sys
import tarfile
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import Client
from ingot.steps.samples.files import sample_files
from ingot.tensors.arrays import as_bytes
from tests.support import ROOT

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
COUNT = 100
TEXT = "Invoice total 118.50 EUR; see page 12 (annex B) - Thank you for your order No. #40-771 at 09:45"
WORDS = [*TEXT.split(" ")]
PIPELINE = """
[pipelines.read]
inputs = ["image"]
outputs = { text = "recognize.text", score = "recognize.score", polygon = "detect.polygon", count = "detect.count" }
[pipelines.read.nodes.detect]
model = "boxes"
inputs = { image = "image" }
[pipelines.read.nodes.crop]
step = "crop"
inputs = { image = "image", polygon = "detect.polygon" }
each = "polygon"
count = "detect.count"
[pipelines.read.nodes.direction]
model = "directions"
inputs = { image = "crop.image" }
[pipelines.read.nodes.turn]
step = "rotate"
inputs = { image = "crop.image" }
when = [{ value = "direction.label", equals = "180" }, { value = "direction.score", above = 0.9 }]
[pipelines.read.nodes.recognize]
model = "texts"
inputs = { image = ["turn.image", "crop.image"] }
"""
KINDS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
CLASSIFIER = """
task = "image-classification"
labels = ["0", "180"]
function = "none"
top_k = 1
pixels = "x"
logits = "save_infer_model/scale_0.tmp_1"
operations = [
    {operation = "reverse"},
    {operation = "resize", rule = "line", height = 48, width = 192, longest = 192, filter = "opencv_linear"},
    {operation = "rescale", factor = 0.00392156862745098},
    {operation = "normalize", mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5]},
    {operation = "pad", to = "size", height = 48, width = 192},
]
"""
RECOGNIZER = """
task = "image-to-text"
characters = "keys.txt"
pixels = "x"
logits = "softmax_11.tmp_0"
"""
DETECTOR = """
task = "text-detection"
pixels = "x"
probabilities = "sigmoid_0.tmp_0"
"""


def written(size: int, text: str, choose: random.Random) -> Any:
    """Return a picture of a line of text, in colours, sometimes slanted, bold or with noise."""
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(size) if choose.random() < 0.9 else ImageFont.load_default_imagefont()
    left, top, right, bottom = map(int, font.getbbox(text))
    light, dark = (tuple(choose.randint(low, low + 100) for _ in range(3)) for low in (155, 0))
    ground, ink = (light, dark) if choose.random() < 0.8 else (dark, light)
    margin = choose.randint(2, 12)
    line = Image.new("RGB", (right - left + 2 * margin, bottom - top + 2 * margin), ground)
    bold = 1 if choose.random() < 0.2 and size > 20 else 0
    ImageDraw.Draw(line).text((margin - left, margin - top), text, ink, font, stroke_width=bold)
    if choose.random() < 0.2:
        slant = 0.25 * line.height
        line = line.transform(line.size, Image.Transform.AFFINE, (1, 0.25, -slant / 2, 0, 1, 0), fillcolor=ground)
    if choose.random() < 0.2:
        noise = Image.effect_noise(line.size, 40).convert("RGB")
        line = Image.blend(line, noise, 0.15)
    return line


def lines() -> Iterator[tuple[str, bytes]]:
    choose = random.Random(0)
    for index in range(COUNT):
        picture = written(choose.randint(9, 60), " ".join(choose.sample(WORDS, choose.randint(1, 7))), choose)
        yield saved(picture.rotate(180) if index % 2 else picture, index)


def pages() -> Iterator[tuple[str, bytes]]:
    from PIL import Image

    choose = random.Random(1)
    for index in range(COUNT):
        page = Image.new("RGB", (choose.randint(240, 1000), choose.randint(240, 1000)), "white")
        for _ in range(choose.randint(0, 6)):
            line = written(choose.randint(14, 48), " ".join(choose.sample(WORDS, choose.randint(1, 4))), choose)
            if choose.random() < 0.3:
                line = line.rotate(choose.uniform(-30, 30), expand=True, fillcolor="white")
            page.paste(line, (choose.randint(0, page.width - 40), choose.randint(0, page.height - 40)))
        yield saved(page, index)


def saved(picture: Any, index: int) -> tuple[str, bytes]:
    kind = KINDS[index % 5]  # a GIF has a palette, whose indices the package reads as grey
    file = io.BytesIO()
    (picture.convert("L") if index % 7 == 0 else picture).save(file, kind)
    return f"{index:03}.{kind.lower()}", file.getvalue()


def kinds_of_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    contents = [*sample_files(), *pictures(), *sources(), *containers(folder)]
    for index, content in enumerate(contents):
        yield f"{index:03}", content


def pictures() -> Iterator[bytes]:
    picture = written(30, "a picture", random.Random(2))
    for kind in (*KINDS, "PPM", "ICO", "PDF", "TGA"):
        file = io.BytesIO()
        picture.save(file, kind)
        yield file.getvalue()


def sources() -> Iterator[bytes]:
    for module in (inspect, json, random, string, subprocess, tarfile, wave):
        source = inspect.getsource(module)
        yield from (source.encode(), source[:300].encode(), source[-2000:].encode() + b"\n\n")


def containers(folder: Path) -> Iterator[bytes]:
    plain = " ".join(WORDS * 300).encode()
    for kind in ("w", "w:gz", "w:bz2", "w:xz"):
        file = io.BytesIO()
        with tarfile.open(mode=kind, fileobj=file) as tar:
            tar.add(__file__)
        yield file.getvalue()
    yield from (bz2.compress(plain), lzma.compress(plain), plain, plain[:100], plain.decode().encode("utf-16"))
    with sqlite3.connect(folder / "a.db") as base:
        base.execute("create table words (word text)")
        base.executemany("insert into words values (?)", [(word,) for word in WORDS])
    base.close()
    yield (folder / "a.db").read_bytes()
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(np.arange(9000, dtype=np.int16).tobytes())
    yield (folder / "a.wav").read_bytes()
    array = io.BytesIO()
    np.save(array, np.arange(900))
    yield array.getvalue()
    yield Path(sys.executable).read_bytes()[:100_000]
    for size in range(1, 20):
        yield plain[:size] if size % 2 else b"\n\t " * size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    drawn = {"lines": lines(), "pages": pages(), "files": kinds_of_files(folder)}
    for name, files in drawn.items():
        (folder / name).mkdir()
        for file, content in files:
            (folder / name / file).write_bytes(content)
        assert len([*(folder / name).iterdir()]) >= COUNT
    return folder


@pytest.fixture(scope="module")
def originals(folder: Path) -> dict[str, Any]:
    """The answers of the packages, and the folders of their models."""
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    needed = ["-r", str(HERE / "packages.txt"), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *needed], check=True)
    done = subprocess.run([python, HERE / "packages.py", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def client(folder: Path, originals: dict[str, Any]) -> Iterator[Client]:
    """A client of a server with the four models, each exported by the command."""
    pytest.importorskip("magika")
    import onnx

    models = Path(originals["folders"]["ocr"])
    recognizer = models / "ch_PP-OCRv4_rec_infer.onnx"
    described = {item.key: item.value for item in onnx.load(recognizer).metadata_props}
    (folder / "keys.txt").write_text(described["character"], encoding="utf-8")
    sources = {
        "texts": (recognizer, RECOGNIZER, ()),
        "directions": (models / "ch_ppocr_mobile_v2.0_cls_infer.onnx", CLASSIFIER, ("--input", _LINE)),
        "boxes": (models / "ch_PP-OCRv4_det_infer.onnx", DETECTOR, ()),
        "types": (Path(originals["folders"]["magika"]) / "model.onnx", "", ()),
    }
    for name, (model, toml, options) in sources.items():
        steps = folder / f"{name}.toml" if toml else model.parent
        if toml:
            steps.write_text(toml)
        command = ["export", model, "--steps", steps, "--name", name, *options, "--out", folder / f"{name}.ingot"]
        done = subprocess.run(
            [sys.executable, "-m", "ingot", *map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        if name == "types":
            assert "answers of 44 files equal to magika" in done.stderr
    archives = [str(folder / f"{name}.ingot") for name in sources]
    (folder / "ingot.toml").write_text(PIPELINE)
    with (
        ingot.serve(*archives, config=folder / "ingot.toml", http_port=0, grpc_port=0) as server,
        Client(server.http_url) as client,
    ):
        yield client


_LINE = "x:float32[batch,3,48,192]"


def read(folder: Path, names: Sequence[str]) -> Any:
    return as_bytes([(folder / name).read_bytes() for name in names])


def test_the_recognizer_reads_the_same_texts(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    wanted = originals["texts"]
    for name, (text, score) in wanted.items():
        found = client.infer("texts", {"image": read(folder / "lines", [name])})
        assert found["text"][0].decode() == text, name
        assert found["score"][0] == pytest.approx(score, abs=1e-5), name
    assert sum(len(text) > 3 for text, _ in wanted.values()) > COUNT / 2  # they are texts


def test_lines_of_one_request_answer_as_alone(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    from PIL import Image

    narrow = []
    for path in sorted((folder / "lines").iterdir()):
        with Image.open(path) as picture:
            narrow += [path.name] if picture.width / picture.height <= 320 / 48 else []
    assert len(narrow) >= 20
    found = client.infer("texts", {"image": read(folder / "lines", narrow)})
    for name, text, score in zip(narrow, found["text"].tolist(), found["score"].tolist(), strict=True):
        assert text.decode() == originals["texts"][name][0]
        assert score == pytest.approx(originals["texts"][name][1], abs=1e-5)


def test_the_classifier_finds_the_same_directions(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    names = [*originals["directions"]]
    found = client.infer("directions", {"image": read(folder / "lines", names)})
    wanted = [originals["directions"][name] for name in names]
    assert found["label"][:, 0].tolist() == [label.encode() for label, _ in wanted]
    assert found["score"][:, 0].tolist() == pytest.approx([score for _, score in wanted], abs=1e-5)
    assert {label for label, _ in wanted} == {"0", "180"}


def test_the_detector_finds_the_same_boxes(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    count = 0
    for name, (polygons, scores, whole) in originals["boxes"].items():
        found = client.infer("boxes", {"image": read(folder / "pages", [name])})
        assert found["polygon"][0].tolist() == polygons == whole, name
        assert found["score"][0].tolist() == pytest.approx(scores, abs=1e-5), name
        count += len(polygons)
    assert count > 100


def test_a_pipeline_reads_the_same_pages(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    lines = 0
    for name, wanted in originals["reads"].items():
        found = client.infer("read", {"image": read(folder / "pages", [name])})
        assert found["count"].tolist() == [len(wanted)], name
        for corners, text, score, polygon, other, mine in zip(
            *zip(*wanted, strict=True), found["polygon"][0], found["text"][0], found["score"][0], strict=True
        ):
            assert polygon.tolist() == corners, name
            assert other.decode() == text, name
            assert mine == pytest.approx(score, abs=1e-5), name
        lines += len(wanted)
    assert lines >= COUNT


def test_files_have_the_same_types(client: Client, folder: Path, originals: dict[str, Any]) -> None:
    for name, (label, score) in originals["types"].items():
        found = client.infer("types", {"file": read(folder / "files", [name])})
        assert found["label"].tolist() == [[label.encode()]], name
        assert found["score"][0, 0] == pytest.approx(score, abs=1e-5), name
    assert len({label for label, _ in originals["types"].values()}) > 15
