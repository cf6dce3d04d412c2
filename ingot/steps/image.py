"""The steps of the tasks on pictures, as the export describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.errors import InvalidArgument
from ingot.steps.after.classify import Classify
from ingot.steps.images.image import Image
from ingot.steps.images.operations import Filter, Operation
from ingot.steps.images.presets import IMAGENET, classifier
from ingot.steps.pipeline import Steps
from ingot.steps.text import Described
from ingot.tensors import DType, TensorSpec

_BATCH = "batch"
_MOST_ITEMS = 256


def image_classification(
    labels: Sequence[str],
    *,
    size: int | tuple[int, int] = 224,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    resize: int | None = None,
    filter: Filter = "bilinear",  # noqa: A002 - as the operation calls it
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a classifier of pictures.

    Examples:
        >>> steps = ingot.steps.image_classification(["cat", "dog"], size=224, resize=256)
        >>> archive = ingot.export_model(net, inputs="pixel_values:float32[batch,3,224,224]", steps=steps, name="pets")

    Args:
        labels: the names of classes, in the order of the logits.
        size: of the graph's input, in pixels: a side, or height and width.
        mean: of each channel, for values from 0 to 1.
        std: likewise.
        resize: the shorter side before the centre is cut out; by default a picture is stretched to ``size``.
        filter: of the resize.
        operations: instead of these five, such as those of :func:`ingot.steps.images.presets.from_timm`.
        options: fields of :class:`~ingot.steps.images.image.Image`, such as ``pixels``, the graph's input, and of
            :class:`~ingot.steps.after.classify.Classify`, such as ``top_k``.

    Raises:
        InvalidArgument: ``resize`` is smaller than ``size``, or an option is wrong.
    """
    before = {name: options.pop(name) for name in Image.model_fields.keys() & options.keys()}
    if unknown := options.keys() - Classify.model_fields.keys():
        known = ", ".join((*Image.model_fields, *Classify.model_fields))
        raise InvalidArgument(f"'{min(unknown)}' is not an option of a classifier of pictures: {known}")
    if operations is None:
        operations = classifier(size, mean, std, resize=resize, filter=filter)
    image = Image(operations=tuple(operations), **before)
    classify = Classify(labels=tuple(labels), **options)
    shape = (_BATCH, classify.count)
    steps = Steps(
        task="image-classification",
        inputs=(TensorSpec(image.image, DType.BYTES, (_BATCH,)),),
        outputs=(TensorSpec(classify.label, DType.BYTES, shape), TensorSpec(classify.score, DType.FP32, shape)),
        before=(image,),
        after=(classify,),
        max_items=_MOST_ITEMS,
    )
    return Described(steps)
