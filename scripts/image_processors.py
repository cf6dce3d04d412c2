"""Compares the steps of transformers' image processors with the processors, and writes the table of the reference.

``python scripts/image_processors.py`` compares each class of the installed transformers that has a PIL backend, as it
is without options, on 60 pictures, and writes docs/reference/image-processors.md. A test checks that the page is
current.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, TooLarge, Unsupported
from ingot.steps.images.decoding import Limits, decode, prepare
from ingot.steps.images.operations import Pipeline
from ingot.steps.images.pictures import drawn
from ingot.steps.images.processors import operations_of
from ingot.tensors import Array

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "image-processors.md"
# Options without which a class makes no values of pixels.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "ImageGPT": {
        "clusters": np.random.default_rng(0).uniform(-1, 1, (512, 3)).tolist(),
        "size": {"height": 32, "width": 32},
    },
    "LayoutLMv2": {"apply_ocr": False},
    "LayoutLMv3": {"apply_ocr": False},
}
_PAIRS, _FRAMES = "its models read pairs of pictures", "its models read the frames of a video"
_GENERATES = "its models generate text or pictures, which no task does"
# Why a class has no steps; for others, the mechanism that no operation stands for is named by its methods.
_REASONS: Mapping[str, str] = {
    "EfficientLoFTR": _PAIRS,
    "Glmga": _GENERATES,
    "LightGlue": _PAIRS,
    "Nougat": _GENERATES,
    "OneFormer": "its models also read the name of a subtask as tokens",
    "Owlv2": "resizes with scipy; its models also read texts",
    "Pixtral": _GENERATES,
    "SegGpt": "its models also read another picture and its segmentation",
    "Siglip2": "makes a list of patches with a mask and the size of their grid",
    "SuperGlue": _PAIRS,
    "Tvp": _FRAMES,
    "VideoMAE": _FRAMES,
    "VitMatte": "its models also read a map of what is certain",
    "VitPose": "cuts out boxes that another model finds",
    "ZoeDepth": "resizes with PyTorch instead of Pillow",
}
_COUNT = 60
_LARGE = 512


@dataclass(frozen=True)
class Row:
    """A class: the numbers of pictures with equal values, with others, and refused ones; or why it has no steps."""

    name: str
    equal: int = 0
    different: int = 0
    refused: int = 0
    worst: float = 0
    operations: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        results = [f"{self.equal} equal"]
        results += [f"{self.different} differ by up to {self.worst:.1e}"] if self.different else []
        results += [f"{self.refused} too narrow"] if self.refused else []
        return f"| {self.name} | {', '.join(results)} | {', '.join(self.operations)} |"


def classes() -> Iterator[Any]:
    """Yield the classes of the installed transformers with a PIL backend, by their names."""
    from transformers import models
    from transformers.image_processing_backends import PilBackend

    found = {}
    for package in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{package.name}.image_processing_pil_{package.name}"
        if importlib.util.find_spec(name) is None:
            continue
        for each in vars(importlib.import_module(name)).values():
            if isinstance(each, type) and issubclass(each, PilBackend) and each.__module__ == name:
                found[each.__name__] = each
    yield from (found[name] for name in sorted(found))


def row_of(kind: Any, count: int = _COUNT) -> Row:
    """Compare the steps of a class with the class itself."""
    name = kind.__name__.removesuffix("Pil")
    try:
        processor = _made(kind, OPTIONS.get(name.removesuffix("ImageProcessor"), {}))
        operations = operations_of(processor)
    except Unsupported as error:
        return Row(name, reason=_reason(kind) or _short(str(error)))
    except ImportError as error:
        return Row(name, reason=f"needs {error.name or 'a package'}")
    pipeline = Pipeline(operations, Limits().resized_pixels)
    errors: list[float] = []
    prepare()
    for content in _pictures()[:count]:
        try:
            found = pipeline.apply(decode(content, Limits()))
        except (InvalidArgument, TooLarge):
            continue
        expected = reference(processor, content)
        alike = found.dtype == expected.dtype and found.shape == expected.shape
        errors.append(float(np.abs(found.astype(float) - expected).max()) if alike else np.inf)
    equal, worst = errors.count(0), max(errors, default=0)
    names = tuple(each.operation for each in operations)
    return Row(name, equal, len(errors) - equal, count - len(errors), worst, names)


@functools.cache
def _pictures() -> list[bytes]:
    return [*drawn(_COUNT)]


def _made(kind: Any, options: Mapping[str, Any]) -> Any:
    """Return a processor without options, except that large sizes are a quarter, which takes minutes less."""
    made = kind(**options)
    sizes = {name: side for name, side in dict(made.size or {}).items() if side}
    if max(sizes.values(), default=0) < _LARGE:
        return made
    return kind(**options, size={name: side // 4 for name, side in sizes.items()})


def reference(processor: Any, content: bytes) -> Array:
    """Return a processor's values of an upright picture, in RGB on white unless the processor converts it."""
    from PIL import Image, ImageOps
    from transformers.image_transforms import convert_to_rgb

    picture = ImageOps.exif_transpose(Image.open(BytesIO(content)))
    if not processor.do_convert_rgb:
        picture = Image.fromarray(convert_to_rgb(picture, return_numpy=True))
    found = processor(picture, return_tensors="np")
    if hasattr(found, "keys"):
        found = found.get("pixel_values", next(iter(found.values())))  # YOLOS's processor may return its mask first
    values: Array = np.asarray(found)
    return values[0]


def _reason(kind: Any) -> str:
    """Return why a class has no steps: what is stated, or that the models of its package generate text or pictures."""
    package, name = kind.__module__.rpartition(".")[0], kind.__name__.removesuffix("ImageProcessorPil")
    if name in _REASONS:
        return _REASONS[name]
    modeling = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    heads = [each for each in vars(modeling) if "For" in each]
    return _GENERATES if any(each.endswith(("ForConditionalGeneration", "ForCausalLM")) for each in heads) else ""


def _short(reason: str) -> str:
    """Return the reason of a refusal without its remedy."""
    return reason.partition(":")[0].rpartition(", as ")[2]


def page() -> str:
    """Return the page of the reference."""
    import PIL
    import transformers

    rows = []
    for kind in classes():
        rows.append(row_of(kind))
        print(rows[-1].name, rows[-1].reason or rows[-1].equal, file=sys.stderr)
    known = [row for row in rows if not row.reason]
    with_steps = "\n".join(map(str, known))
    without = "\n".join(f"| {row.name} | {row.reason} |" for row in rows if row.reason)
    return f"""# Image processors

Which image processors of transformers `ingot export` turns into [steps](../guides/serve/image-classifier.md), written
by `python scripts/image_processors.py` with transformers {transformers.__version__} and Pillow {PIL.__version__}.

Each class was compared as it is without options, except that sizes of {_LARGE} pixels and more were divided by four,
with the backend `pil`, on {_COUNT} pictures of odd sizes, modes, orientations and transparency. "Equal" is the number
of pictures whose values are equal to the last bit, "too narrow" the number of those that are refused because one side
would have no pixels, or the other too many. Of the {len(rows)} classes, {len(known)} have steps. An export compares the
processor with the options of your model once more.

The backend `torchvision` resizes with another rounding: its values are within 1/(255 · the smallest deviation) of
these.

| class | result | operations |
|---|---|---|
{with_steps}

The others have no steps, for the reasons here. Send tensors to such models, or declare the steps by hand.

| class | reason |
|---|---|
{without}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
