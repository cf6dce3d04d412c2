"""Handlers of TorchServe in the styles of public ones, as the files of their archives, with requests to each.

``python -m tests.server.torchserve.handlers`` runs one by hand: its own code, with a context, and no server.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from tests.importing.sources import mar

WORDS = """
import json
import logging
import os

import torch
from ts.torch_handler.base_handler import BaseHandler

logger = logging.getLogger(__name__)


class Words(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        folder = context.system_properties.get("model_dir")
        with open(os.path.join(folder, "vocab.json")) as file:
            self.vocab = json.load(file)
        logger.info("%d words on %s", len(self.vocab), self.device)

    def preprocess(self, requests):
        texts = []
        for row in requests:
            text = row.get("data")
            if text is None:
                text = row.get("body")
            if isinstance(text, (bytes, bytearray)):
                text = text.decode("utf-8")
            if isinstance(text, dict):
                text = text["text"]
            texts.append(text)
        rows = [[self.vocab.get(word, 0) for word in text.lower().split()] for text in texts]
        length = max(map(len, rows))
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.float32)

    def postprocess(self, outputs):
        return [{"scores": row.tolist(), "best": int(row.argmax())} for row in outputs]
"""

CLASSES = """
import torch
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import map_class_to_label


class Classes(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row.get("body")["values"] for row in data])

    def postprocess(self, data):
        scores, classes = torch.topk(torch.softmax(data, dim=1), 2)
        return map_class_to_label(scores.tolist(), self.mapping, classes.tolist())
"""

NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)
"""

VISION = """
import torch
from ts.torch_handler.vision_handler import VisionHandler


def to_tensor(image):
    image = image.convert("RGB").resize((8, 8))
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).reshape(8, 8, 3).permute(2, 0, 1) / 255


class Vision(VisionHandler):
    image_processing = staticmethod(to_tensor)

    def initialize(self, context):
        self.device = torch.device("cpu")
        self.model = torch.nn.AdaptiveAvgPool2d(1)
        self.initialized = True

    def postprocess(self, data):
        return data.flatten(1).tolist()
"""

PLAIN = """
import json
import os
import zipfile


class Plain(object):
    def __init__(self):
        self.initialized = False

    def initialize(self, ctx):
        properties = ctx.system_properties
        model_dir = properties.get("model_dir")
        assert properties.get("gpu_id") is None and properties["batch_size"] == 1
        with zipfile.ZipFile(os.path.join(model_dir, "model.zip")) as archive:
            archive.extractall(model_dir)
        with open("weights/bias.json") as file:
            self.bias = json.load(file)
        self.initialized = True

    def handle(self, data, context):
        numbers = json.loads(data[0].get("body").decode("utf-8"))
        return [[number + self.bias for number in numbers]]
"""

FUNCTION = """
import numpy as np


class Service:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.name = context.manifest["model"]["modelName"]
        self.initialized = True

    def answer(self, rows):
        return ["%s: %s" % (self.name, np.mean(row["body"])) for row in rows]


_service = Service()


def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.answer(data)
"""

ENTRY = """
LOADED = []


def infer(data, context):
    if not data:
        LOADED.append(context.system_properties["server_version"])
        return None
    row = data[0]
    text, left = row["text"].decode(), row["File"]
    return [{
        "text": text,
        "size": len(left),
        "loaded": LOADED,
        "agent": context.get_request_header(0, "X-Agent"),
        "secret": context.get_request_header(0, "authorization"),
        "top": row.get("top", b"none").decode(),
        "ids": len(context.request_ids),
        "same": context.get_request_id(0) == context.request_ids[0],
    }]
"""

GRAPH = """
import os

import numpy as np
import onnxruntime


class Graph:
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        path = os.path.join(folder, context.manifest["model"]["serializedFile"])
        self.session = onnxruntime.InferenceSession(path)

    def handle(self, data, context):
        x = np.frombuffer(data[0]["body"], np.float32).reshape(1, -1)
        (y,) = self.session.run(None, {"x": x})
        context.set_response_content_type(0, "application/x-floats")
        context.set_response_header(0, "X-Shape", "1,%d" % y.shape[1])
        return [y.tobytes()]
"""

MODULES = """
from shapes.square import area
from util import double
from ts.torch_handler.base_handler import BaseHandler


class Modules(BaseHandler):
    def initialize(self, context):
        self.scale = context.model_yaml_config["handler"]["scale"]
        self.context = context

    def preprocess(self, data):
        return [row["body"]["side"] for row in data]

    def inference(self, sides):
        return [double(area(side)) * self.scale for side in sides]

    def postprocess(self, areas):
        return [{"area": area, "batch": len(areas)} for area in areas]
"""

TENSOR = """
import torch


class Tensor:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [str(torch.tensor(row["body"]).sum().item()) for row in data]
"""

FAULTS = """
from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException


class Faults(BaseHandler):
    def initialize(self, context):
        self.count = context.metrics.add_metric_to_cache("Counted", unit="count", dimension_names=["ModelName"])

    @timed
    def handle(self, data, context):
        context.metrics.add_time("Waited", 2.5)
        context.metrics.add_counter("Requests", len(data))
        self.count.add_or_update(1, ["faults"])
        do = [row.get("data", row.get("body")).decode() for row in data]
        results = []
        for index, each in enumerate(do):
            if each == "raise":
                raise KeyError("no such key")
            if each == "code":
                raise PredictionException("the picture is too dark", 422)
            if each == "odd":
                raise PredictionException("an odd code", 200)
            if each == "memory":
                raise RuntimeError("CUDA out of memory")
            if each == "exit":
                raise SystemExit(1)
            if each == "short":
                return []
            if each == "text":
                return "no list"
            if each == "object":
                return [object()]
            if each == "status":
                context.set_response_status(code=404, phrase="Nothing", idx=index)
            if each == "wrong-status":
                context.set_response_status(code=999, idx=index)
            if each == "header":
                context.set_response_header(index, "X-Evil", "a\\r\\nSet-Cookie: b")
            results.append({"did": each})
        return results
"""


PARTS = """
import torch
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler


class Parts(BaseHandler):
    def initialize(self, context):
        self.context = context

    def preprocess(self, data):
        return [row["body"]["words"] for row in data]

    def inference(self, rows):
        for index in range(max(map(len, rows)) - 1):
            parts = [row[index] + " " if index < len(row) - 1 else "" for row in rows]
            send_intermediate_predict_response(parts, self.context.request_ids, "part", 200, self.context)
        return rows

    def postprocess(self, rows):
        return [row[-1] for row in rows]

    def get_insights(self, rows, raw, target):
        return [{"words": len(row), "raw": raw, "target": target} for row in rows]
"""


@dataclass(frozen=True)
class Request:
    """What a client sends, and the row that TorchServe makes of it."""

    sent: Mapping[str, Any]
    row: Mapping[str, Any]
    query: str = ""
    path: str = ""


@dataclass(frozen=True)
class Case:
    """A handler: the files of its archive, its manifest, and requests."""

    files: Mapping[str, bytes]
    requests: tuple[Request, ...]
    model: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def script() -> bytes:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), stream := io.BytesIO())
    return stream.getvalue()


def weights() -> bytes:
    torch.manual_seed(2)
    torch.save({"layer.weight": torch.randn(3, 4), "layer.bias": torch.randn(3)}, stream := io.BytesIO())
    return stream.getvalue()


def graph() -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "n"]) for name in "xy")
    made = helper.make_model(
        helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def picture() -> bytes:
    from PIL import Image

    Image.linear_gradient("L").save(stream := io.BytesIO(), "PNG")
    return stream.getvalue()


def packed() -> bytes:
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as file:
        file.writestr("weights/bias.json", "2.5")
    return stream.getvalue()


def _json(value: Any, **more: Any) -> Request:
    return Request({"json": value}, {"body": value}, **more)


def cases() -> dict[str, Case]:
    """Return the handlers by their names."""
    words = b"a red cat"
    png = picture()
    floats = torch.arange(4.0).numpy().tobytes()
    return {
        "words": Case(
            {
                "words.py": WORDS.encode(),
                "net.pt": script(),
                "vocab.json": b'{"red": 1.5, "cat": 2}',
            },
            (
                Request({"data": {"data": words.decode()}}, {"data": bytearray(words)}),
                Request({"content": words}, {"body": bytearray(words)}),
                Request({"content": words, "headers": {"content-type": "text/plain"}}, {"body": words.decode()}),
                _json({"text": "cat red red"}),
            ),
            {"serializedFile": "net.pt"},
        ),
        "classes": Case(
            {
                "classes.py": CLASSES.encode(),
                "net.py": NET.encode(),
                "net.pth": weights(),
                "index_to_name.json": b'{"0": "cat", "1": ["n1", "dog"], "2": "bird"}',
            },
            (_json({"values": [1.0, -2.0, 0.5, 3.0]}),),
            {"serializedFile": "net.pth", "modelFile": "net.py"},
        ),
        "vision": Case(
            {"vision.py": VISION.encode()},
            (
                Request({"files": {"data": ("p.png", png, "image/png")}}, {"data": bytearray(png)}),
                Request({"content": png}, {"body": bytearray(png)}),
                Request(
                    {"files": {"data": ("p.txt", base64.b64encode(png), "text/plain")}},
                    {"data": base64.b64encode(png).decode()},
                ),
            ),
        ),
        "plain": Case(
            {"plain.py": PLAIN.encode(), "model.zip": packed()},
            (Request({"content": b"[1, 2]"}, {"body": bytearray(b"[1, 2]")}),),
        ),
        "function": Case({"function.py": FUNCTION.encode()}, (_json([1, 2, 6]),)),
        "entry": Case(
            {"entry.py": ENTRY.encode()},
            (
                Request(
                    {"files": {"text": (None, b"hello"), "File": ("l.bin", b"\x00\xff")}},
                    {"text": bytearray(b"hello"), "File": bytearray(b"\x00\xff")},
                    query="?top=3",
                ),
                Request(
                    {"files": {"text": (None, b"{}", "application/json"), "File": ("l.bin", b"")}},
                    {"top": bytearray(b"3"), "text": bytearray(b"{}"), "File": bytearray()},
                    path="/invocations?model_name=entry&top=3",
                ),
            ),
            {"handler": "entry.py:infer"},
            {"X-Agent": "tests", "Authorization": "Bearer k"},
        ),
        "graph": Case(
            {"graph.py": GRAPH.encode(), "net.onnx": graph()},
            (Request({"content": floats}, {"body": bytearray(floats)}),),
            {"serializedFile": "net.onnx"},
        ),
        "modules": Case(
            {
                "modules.py": MODULES.encode(),
                "util.py": b"def double(x):\n    return 2 * x\n",
                "shapes/__init__.py": b"",
                "shapes/square.py": b"def area(side):\n    return side * side\n",
                "model-config.yaml": b"batchSize: 4\nmaxBatchDelay: 200\nminWorkers: 1\nhandler:\n  scale: 10\n",
            },
            (_json({"side": 3}),),
            {"configFile": "model-config.yaml"},
        ),
        "parts": Case(
            {"parts.py": PARTS.encode(), "model-config.yaml": b"batchSize: 2\n"},
            (_json({"words": ["last"]}),),
            {"configFile": "model-config.yaml"},
        ),
        "tensor": Case({"tensor.py": TENSOR.encode()}, (_json([1, 2, 3]),)),
        "faults": Case(
            {"faults.py": FAULTS.encode()},
            (Request({"content": b"work"}, {"body": bytearray(b"work")}),),
        ),
    }


def archive(folder: Path, name: str, case: Case) -> Path:
    model = {"handler": f"{name}.py", **case.model}
    return mar(folder / f"{name}.mar", case.files, modelName=name, modelVersion="1.0", **model)


def run(folder: Path, name: str) -> list[str]:
    """Return the answers of a handler in this process, each as base64."""
    from ingot.runtime.engines.python.torchserve import ts
    from ingot.runtime.engines.python.torchserve.rows import HandlerRequest
    from ingot.runtime.engines.python.torchserve.ts.context import Context

    case = cases()[name]
    with zipfile.ZipFile(archive(folder, name, case)) as file:
        file.extractall(folder)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    ts.install()
    manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
    config = {"handler": {"scale": 10}}
    properties = {"model_dir": str(folder), "gpu_id": None, "batch_size": 1, "server_version": ts.VERSION}
    context = Context(name, manifest, properties, config)
    module = importlib.import_module(name)
    function = getattr(module, manifest["model"]["handler"].partition(":")[2] or "handle", None)
    if function is not None:
        function(None, context)
        call = function
    else:
        service = getattr(module, name.capitalize())()
        service.initialize(context)
        call = service.handle
    answers = []
    for request in case.requests:
        headers = {key.lower(): value for key, value in case.headers.items() if key != "Authorization"}
        context.begin([HandlerRequest(dict(request.row), headers)])
        (found,) = call([dict(request.row)], context)
        raw = found if isinstance(found, bytes) else (found if isinstance(found, str) else json.dumps(found, indent=2))
        answers.append(base64.b64encode(raw if isinstance(raw, bytes) else raw.encode()).decode())
    return answers


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
