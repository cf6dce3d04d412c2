"""The steps of the tasks that read texts from pictures, as the export describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.steps.after.ctc import Ctc
from ingot.steps.after.text_boxes import TextBoxes
from ingot.steps.images.decoding import Limits
from ingot.steps.images.image import Image
from ingot.steps.images.operations import Normalize, Operation, Pad, Rescale, Resize, Reverse
from ingot.steps.tasks.described import BATCH, Described, described, options_checked, split
from ingot.tensors import DType, TensorSpec

_MOST_ITEMS = 256
_HALF = (0.5, 0.5, 0.5)
# Pixels of the detector's input: a picture of 2,000 x 2,000, or of 8 to 1.
_MOST_AREA = 4_500_000
# By which the sides of the detector's input can be divided.
_MULTIPLE = 32
# The factor that OpenCV's users multiply float32 by.
_RESCALE = Rescale(factor=float(np.float32(1 / 255)))


@options_checked
def image_to_text(
    characters: Sequence[str],
    *,
    height: int = 48,
    width: int = 320,
    longest: int = 3200,
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a recognizer of lines of text that was trained with CTC, as PaddleOCR's are.

    A line gets ``height`` pixels in the order BGR, and is extended to ``width``; wider ones keep their own width. Each
    line answers as alone: lines of other widths than ``width`` share a call only with those of the same width.

    Examples:
        >>> steps = ingot.steps.image_to_text(Path("keys.txt").read_text().splitlines(), pixels="x", logits="softmax")
        >>> archive = ingot.export_model(net, steps=steps, name="lines")

    Args:
        characters: in the order of the logits, without the blank before them and the space behind them.
        height: of the graph's input, in pixels.
        width: of a line that is not wider.
        longest: width of the widest line; wider ones are refused.
        operations: instead of these.
        options: fields of :class:`~ingot.steps.images.image.Image`, such as ``pixels``, the graph's input, and of
            :class:`~ingot.steps.after.ctc.Ctc`, such as ``logits`` and ``function``, whose default is ``none`` for
            probabilities.

    Raises:
        InvalidArgument: an option is wrong.
    """
    if operations is None:
        operations = line(height, width, 0)
    before, after = split("image-to-text", {"limits": Limits(resized_pixels=height * longest), **options}, Image, Ctc)
    image = Image(operations=tuple(operations), **before)
    tokens = {"tokens": ("", *characters, " "), "blank": "", "delimiter": ""}
    ctc = Ctc.model_validate({**tokens, "strip": False, "score": "score", **after})
    answers = (TensorSpec(ctc.text, DType.BYTES, (BATCH,)), TensorSpec(ctc.score, DType.FP32, (BATCH,)))
    return _described("image-to-text", image, ctc, answers, f"{height},width={width}..{longest}")


@options_checked
def text_detection(
    *,
    edge: int = 736,
    longest: int = 0,
    most: int = 5888,
    mean: Sequence[float] = _HALF,
    std: Sequence[float] = _HALF,
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a detector of lines of text with differentiable binarization, as PaddleOCR's are.

    Examples:
        >>> steps = ingot.steps.text_detection(pixels="x", probabilities="sigmoid_0.tmp_0")
        >>> archive = ingot.export_model(net, steps=steps, name="pages")

    Args:
        edge: pixels to which the shorter side of a smaller picture is enlarged; 0 for as it is.
        longest: pixels to which the longer side of a larger picture is shrunk; 0 for as it is.
        most: pixels of a side of the graph's input; the area has the limit of ``limits``, by default 4.5 million.
        mean: of each channel, in the order BGR, for values from 0 to 1.
        std: likewise.
        operations: instead of these.
        options: fields of :class:`~ingot.steps.images.image.Image`, such as ``pixels``, the graph's input, and of
            :class:`~ingot.steps.after.text_boxes.TextBoxes`, such as ``probabilities`` and ``least_score``.

    Raises:
        InvalidArgument: an option is wrong.
    """
    if operations is None:
        page = Resize(rule="page", edge=edge, longest=longest, multiple=_MULTIPLE, filter="opencv_linear")
        operations = Reverse(), page, _RESCALE, Normalize(mean=mean, std=std)
    given = {"limits": Limits(resized_pixels=_MOST_AREA), "size": "original_size", **options}
    before, after = split("text-detection", given, Image, TextBoxes)
    image, boxes = Image(operations=tuple(operations), **before), TextBoxes(size=before["size"], **after)
    row = (BATCH, "boxes")
    answers = (
        TensorSpec(boxes.label, DType.BYTES, row),
        TensorSpec(boxes.score, DType.FP32, row),
        TensorSpec(boxes.box, DType.FP32, (*row, 4)),
        TensorSpec(boxes.polygon, DType.INT32, (*row, 4, 2)),
        TensorSpec(boxes.count, DType.INT32, (BATCH,)),
    )
    sides = ",".join(f"{side}={_MULTIPLE}..{most}:{_MULTIPLE}" for side in ("height", "width"))
    return _described("text-detection", image, boxes, answers, sides)


def line(height: int, width: int, longest: int) -> tuple[Operation, ...]:
    """Return PaddleOCR's operations on a line of text.

    Args:
        height: of the result, in pixels.
        width: of a line that is not wider; the rest is zeros.
        longest: to which wider lines are compressed; 0 for their own width.
    """
    resize = Resize(rule="line", height=height, width=width, longest=longest, filter="opencv_linear")
    return Reverse(), resize, _RESCALE, Normalize(mean=_HALF, std=_HALF), Pad(to="at_least", height=height, width=width)


def _described(task: str, image: Image, after: Ctc | TextBoxes, answers: Sequence[TensorSpec], sides: str) -> Described:
    inputs = (TensorSpec(image.image, DType.BYTES, (BATCH,)),)
    found = described(task, inputs, image, (after,), answers, max_items=_MOST_ITEMS)
    return replace(found, inputs=(f"{image.pixels}:float32[{BATCH},3,{sides}]",))
