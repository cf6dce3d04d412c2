"""Custom handlers whose code has a known form become steps, once their answers to recorded requests are the steps'."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import ingot
from ingot.cli.create.handler_proof import compared
from ingot.errors import InvalidArgument, ParityError
from ingot.importing.recognition.form import Form
from ingot.importing.recognition.reader import recognized
from ingot.steps.images.pictures import drawn
from tests.importing.sources import mar
from tests.importing.test_handlers import script
from tests.server.torchserve.conftest import PORTS, client
from tests.support import RunIngot, refused

NAMES = {"0": "cat", "1": ["n1", "dog"], "2": "bird", "3": "fox"}
# torchvision is not installed with the tests; a package of the archive stands for it, with Pillow's own resizing.
TRANSFORMS = """
import numpy as np
import torch


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for each in self.transforms:
            value = each(value)
        return value


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, picture):
        return picture.resize(self.size[::-1], 2)


class ToTensor:
    def __call__(self, picture):
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).to(torch.float32) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, pixels):
        return (pixels - self.mean) / self.std
"""
PICTURES = """
import base64
import io
import logging

import torch
from PIL import Image
from torchvision import transforms
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import map_class_to_label

logger = logging.getLogger(__name__)


class Pets(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.transform = transforms.Compose([
            transforms.Resize((64, 48)),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4]),
        ])

    def one(self, row):
        image = row.get("data")
        if image is None:
            image = row.get("body")
        if isinstance(image, str):
            image = base64.b64decode(image)
        if isinstance(image, (bytearray, bytes)):
            image = self.transform(Image.open(io.BytesIO(image)).convert("RGB"))
        else:
            image = torch.FloatTensor(image)
        return image.unsqueeze(0)

    def preprocess(self, data):
        logger.info("%d pictures", len(data))
        return torch.cat([self.one(row) for row in data]).to(self.device)

    def postprocess(self, outputs):
        scores, classes = torch.topk(torch.softmax(outputs, dim=1), 2, dim=1)
        return map_class_to_label(scores.tolist(), self.mapping, classes.tolist())
"""
TEXTS = """
import json
import os

import torch
from transformers import AutoTokenizer
from ts.utils.util import map_class_to_label


class Reviews:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        folder = context.system_properties.get("model_dir")
        self.model = torch.jit.load(os.path.join(folder, "net.pt")).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        with open(os.path.join(folder, "index_to_name.json")) as file:
            self.mapping = json.load(file)
        self.initialized = True

    def handle(self, data, context):
        texts = []
        for row in data:
            text = row.get("review")
            if isinstance(text, (bytes, bytearray)):
                text = text.decode("utf-8")
            texts.append(text.lower())
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=8, return_tensors="pt")
        with torch.no_grad():
            logits = self.model(tokens["input_ids"], tokens["attention_mask"])
        return map_class_to_label(torch.sigmoid(logits).tolist(), self.mapping)


_service = Reviews()


def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.handle(data, context)
"""
DEFAULTS = """
from ts.torch_handler.image_classifier import ImageClassifier


class Own(ImageClassifier):
    topk = 3
"""


class Reviews(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8)
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[:, :, None].float()
        found: torch.Tensor = self.layer((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return found


def read(code: str) -> tuple[Form, str]:
    form, lines = recognized(code, "h.py", "handle")
    return form, "\n".join(lines)


def test_a_handler_of_pictures_is_recognized() -> None:
    form, lines = read(PICTURES)
    assert [each.operation for each in form.operations] == ["resize", "rescale", "normalize"]
    assert (form.sides, form.function, form.best, form.part, form.tokens) == ((64, 48), "softmax", 2, "", None)
    assert "h.py, line 19: transforms.Resize((64, 48))" in lines
    assert "h.py, line 33: left out: torch.FloatTensor(image)" in lines
    assert "map_class_to_label(scores.tolist(), self.mapping, classes.tolist())" in lines


def test_an_answer_to_other_requests_is_named() -> None:
    own = "        if outputs.max() < 0:\n            return ['dark']\n        scores, classes"
    form, lines = read(PICTURES.replace("        scores, classes", own))
    assert (form.function, form.best) == ("softmax", 2)
    assert "h.py, line 42: left out: return ['dark']" in lines


def test_the_other_of_two_branches_is_named() -> None:
    scored = """def scored(values):
    if len(values) > 3:
        scores = torch.softmax(values, 1)
    else:
        scores = torch.sigmoid(values)
    return scores


"""
    form, lines = read(scored + PICTURES.replace("torch.softmax(outputs, dim=1)", "scored(outputs)"))
    assert form.function == "softmax"
    assert "h.py, line 5: left out: scores = torch.sigmoid(values)" in lines


def test_a_handler_of_texts_is_recognized() -> None:
    form, _ = read(TEXTS)
    assert (form.tokens, form.inputs) == ({"lower": True, "max_length": 8}, ("input_ids", "attention_mask"))
    assert (form.function, form.best, form.part) == ("sigmoid", 0, "review")


def test_a_class_of_torchserve_keeps_what_a_handler_does_not_change() -> None:
    form, _ = read(DEFAULTS)
    assert (form.sides, form.best, form.function) == ((224, 224), 3, "softmax")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("transforms.ToTensor(),", "transforms.RandomCrop(4),", r"line 1\d: transforms.Compose\(.*a transform is not"),
        ("transforms.Resize((64, 48))", "transforms.Resize(self.size)", r"line 19: .*Resize\(self.size\)"),
        ('.convert("RGB")', '.convert("L")', r"line 31: .*convert\('L'\)"),
        (".to(self.device)", " * 2", r"line 38: .* \* 2"),
        ("torch.softmax(outputs, dim=1)", "torch.exp(outputs)", r"line 41: torch.exp\(outputs\)"),
        ("), 2, dim=1)", "), self.k, dim=1)", r"line 41: torch.topk.* is not a constant"),
        (
            "map_class_to_label(scores.tolist(), self.mapping, classes.tolist())",
            "scores.tolist()",
            "its answer has no names with scor",
        ),
        ("return torch.cat(", "while True: pass\n        return torch.cat(", "line 38: while True: pass"),
        ("    def postprocess", "    @doubled\n    def postprocess", r"line 40: doubled \(a decorator\)"),
        ("class Pets", "class", "cannot be read as Python"),
    ],
)
def test_what_is_not_recognized_is_named_by_its_line(before: str, after: str, message: str) -> None:
    assert before in PICTURES
    with pytest.raises(InvalidArgument, match=message):
        read(PICTURES.replace(before, after, 1))


def test_recognition_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(InvalidArgument, match="does not become steps"):
        read(f"open({str(trace)!r}, 'w')\ndef handle(data, context):\n    return open({str(trace)!r}, 'w')")
    assert not trace.exists()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    parts = torch.nn.Conv2d(3, 8, 16, 16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(96, 4)
    return torch.nn.Sequential(*parts).eval()


def pets(folder: Path, code: str = PICTURES) -> Path:
    files = {
        "pets.py": code.encode(),
        "net.pt": script(net()),
        "index_to_name.json": json.dumps(NAMES).encode(),
        "torchvision/__init__.py": b"",
        "torchvision/transforms.py": TRANSFORMS.encode(),
    }
    return mar(folder / "pets.mar", files, modelName="pets", serializedFile="net.pt", handler="pets.py")


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.matrix
def test_pictures_are_proved_on_recorded_requests(tmp_path: Path, run_ingot: RunIngot) -> None:
    pytest.importorskip("PIL")
    path, pictures = pets(tmp_path), [*drawn(10, seed=3)]
    as_it_is = ingot.import_model(path, allow_code=True)
    with (
        ingot.serve(
            as_it_is,
            http_port=0,
            grpc_port=0,
            allow_code=True,
            torchserve=True,
            torchserve_ports=PORTS,
            record=str(tmp_path / "traffic"),
            record_share=1,
        ) as server,
        client(server, "inference") as inference,
    ):
        for index, picture in enumerate(pictures):
            sent = {"files": {"data": ("p", picture)}} if index % 2 else {"content": picture}
            assert inference.post("/predictions/pets", **sent).status_code == 200
    out = tmp_path / "pets.ingot"
    done = run_ingot("import", path, "--allow-code", "--without-code", "--prove", tmp_path / "traffic", "-o", out)
    assert done.returncode == 0, done.stderr
    assert "on 10 recorded requests: answers of 10 samples within" in done.stderr
    assert "pets.py, line 19: transforms.Resize((64, 48))" in done.stderr
    assert "no original" not in done.stderr
    variant = ingot.Archive.open(out).variant()
    assert (variant.serving.format, variant.serving.evidence.steps is not None) == ("onnx", True)
    with (
        ingot.serve(out, http_port=0, grpc_port=0, torchserve=True, torchserve_ports=PORTS) as server,
        client(server, "inference") as inference,
    ):
        answer = inference.post("/predictions/pets", content=pictures[0]).json()
    assert len(answer) == 2
    assert answer.keys() <= {"cat", "dog", "bird", "fox"}


@pytest.mark.matrix
def test_described_inputs_do_not_drop_a_handler(tmp_path: Path) -> None:
    archive = ingot.import_model(pets(tmp_path), inputs="pixels:float32[batch,3,64,48]", allow_code=True)
    assert archive.variant().serving.format == "python"


@pytest.mark.matrix
def test_another_answer_is_a_refusal_that_names_the_request(tmp_path: Path, run_ingot: RunIngot) -> None:
    """A package of the archive that has torchvision's name and divides by another number."""
    pytest.importorskip("PIL")
    code = TRANSFORMS.replace("/ 255", "/ 254")
    path = pets(tmp_path)
    files = {"torchvision/transforms.py": code.encode(), "torchvision/__init__.py": b"", "pets.py": PICTURES.encode()}
    files |= {"net.pt": script(net()), "index_to_name.json": json.dumps(NAMES).encode()}
    mar(path, files, modelName="pets", serializedFile="net.pt", handler="pets.py")
    picture = base64.b64encode(next(drawn(1, least=24, modes=("RGB",)))).decode()
    requests = written(tmp_path / "r.jsonl", [{"data": "no picture"}, {"data": {"base64": picture}}])
    out = tmp_path / "pets.ingot"
    found = refused(run_ingot("import", path, "--allow-code", "--without-code", "--prove", requests, "-o", out))
    assert re.search(r"line 2 of r.jsonl: the handler answers \{.*\}, and the steps answer \{", " ".join(found.split()))
    assert not out.exists()


@pytest.mark.matrix
def test_numbers_that_are_not_finite_are_not_equal_to_others(tmp_path: Path, run_ingot: RunIngot) -> None:
    """A package of the archive whose map_class_to_label spoils all answers but the first one."""
    pytest.importorskip("PIL")
    spoiling = """
from ts.utils import util

calls = 0


def map_class_to_label(*given):
    global calls
    calls += 1
    found = util.map_class_to_label(*given)
    return found if calls == 1 else [{name: float("nan") for name in each} for each in found]
"""
    files = {"torchvision/transforms.py": TRANSFORMS.encode(), "torchvision/__init__.py": b"", "net.pt": script(net())}
    files |= {"pets.py": PICTURES.replace("ts.utils.util", "spoiling").encode(), "spoiling.py": spoiling.encode()}
    files["index_to_name.json"] = json.dumps(NAMES).encode()
    path = mar(tmp_path / "pets.mar", files, modelName="pets", serializedFile="net.pt", handler="pets.py")
    pictures = [base64.b64encode(each).decode() for each in drawn(2, least=24, modes=("RGB",))]
    requests = written(tmp_path / "r.jsonl", [{"data": {"base64": picture}} for picture in pictures])
    out = tmp_path / "pets.ingot"
    found = refused(run_ingot("import", path, "--allow-code", "--without-code", "--prove", requests, "-o", out))
    assert "line 2 of r.jsonl: the handler answers" in " ".join(found.split())


@pytest.mark.matrix
def test_texts_are_proved_on_lines_of_json(tmp_path: Path, run_ingot: RunIngot) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(["?", ".", "a", "good", "bad", "film"])}, unk_token="?")
    )
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token=".", unk_token="?").save_pretrained(tmp_path)
    torch.manual_seed(0)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    files |= {"h.py": TEXTS.encode(), "net.pt": script(Reviews().eval())}
    files["index_to_name.json"] = b'{"0": "no", "1": "maybe", "2": "yes", "3": "sure"}'
    path = mar(tmp_path / "reviews.mar", files, modelName="reviews", serializedFile="net.pt", handler="h.py")
    rows = [{"review": text} for text in ("A good film", "a BAD film", "a film " * 30)]
    requests = written(tmp_path / "r.jsonl", rows)
    out = tmp_path / "reviews.ingot"
    done = run_ingot("import", path, "--allow-code", "--without-code", "--prove", requests, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "on 3 recorded requests: answers of 3 samples within" in done.stderr
    assert not ingot.Archive.open(out).variant().serving.requires.get("python")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--without-code"], "belong together"),
        (["--prove", "r.jsonl"], "belong together"),
        (["--without-code", "--prove", "none.jsonl"], "there is no file or folder none.jsonl"),
        (["--without-code", "--prove", "empty.jsonl"], "holds no requests"),
        (["--without-code", "--prove", "list.jsonl"], "line 1 of list.jsonl is not a row of a handler"),
        (["--without-code", "--prove", "r.jsonl"], "the proof runs the handler pets.py, to compare its answers; "),
        (["--without-code", "--without-handler", "--prove", "r.jsonl"], "--without-handler leaves"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, run_ingot: RunIngot, options: list[str], message: str) -> None:
    pets(tmp_path)
    written(tmp_path / "r.jsonl", [{"data": "x"}])
    written(tmp_path / "empty.jsonl", [])
    (tmp_path / "list.jsonl").write_text("[1]\n")
    found = refused(run_ingot("import", "pets.mar", *options, "-o", "pets.ingot", cwd=tmp_path))
    assert message in " ".join(found.split())


def test_small_scores_are_compared_relative_to_the_largest() -> None:
    theirs = [{"cat": 2e-5, "dog": 1e-5}]
    assert compared("line 1", [{"cat": 2e-5, "dog": 1.0001e-5}], theirs) == pytest.approx(5e-5, rel=1e-3)
    with pytest.raises(ParityError, match="line 1: the handler answers"):
        compared("line 1", [{"cat": 2e-5, "dog": 1.1e-5}], theirs)
