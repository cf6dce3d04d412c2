"""The steps of the tasks on pictures, as the export describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ingot.errors import InvalidArgument
from ingot.steps.after.boxes import Boxes
from ingot.steps.after.classify import Classify
from ingot.steps.after.depth import Depth
from ingot.steps.after.masks import Masks
from ingot.steps.after.pixels import MOST_RESIZED
from ingot.steps.after.segments import Segments
from ingot.steps.images.decoding import Limits
from ingot.steps.images.image import Image
from ingot.steps.images.operations import CenterCrop, Filter, Operation, Pad
from ingot.steps.images.presets import IMAGENET, classifier
from ingot.steps.pipeline import AnyStep
from ingot.steps.tasks.described import BATCH, Described, best_classes, described, options_checked, split
from ingot.tensors import DType, TensorSpec

_MOST_ITEMS = 256

_After = TypeVar("_After", Classify, Boxes, Masks, Segments)


@options_checked
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
    if operations is None:
        operations = classifier(size, mean, std, resize=resize, filter=filter)
    task = "image-classification"
    image, after = _steps(task, Classify, labels, operations, options)
    return _described(task, image, after, best_classes(after))


@options_checked
def object_detection(
    labels: Sequence[str],
    *,
    size: int | tuple[int, int] = 640,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    filter: Filter = "bilinear",  # noqa: A002 - as the operation calls it
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a detector: files of pictures in, and boxes in pixels of these pictures out.

    Requests may have the input ``threshold``, which replaces that of the steps. Operations must not crop or extend a
    picture: boxes relate to all of it.

    Examples:
        >>> steps = ingot.steps.object_detection(["car"], size=640, function="sigmoid", top_k=100, overlap=0.5)
        >>> archive = ingot.export_model(
        ...     net, inputs="pixel_values:float32[batch,3,640,640]", steps=steps, name="cars",
        ...     output_names=["logits", "pred_boxes"],
        ... )

    Args:
        labels: the names of classes, in the order of the logits.
        size: of the graph's input, to which a picture is stretched: a side, or height and width.
        mean: of each channel, for values from 0 to 1.
        std: likewise.
        filter: of the resize.
        operations: instead of these.
        options: fields of :class:`~ingot.steps.images.image.Image`, such as ``pixel_mask``, and of
            :class:`~ingot.steps.after.boxes.Boxes`, such as ``function``, ``form``, ``threshold`` and ``overlap``.

    Raises:
        InvalidArgument: an option is wrong, or the operations crop or extend.
    """
    if operations is None:
        operations = classifier(size, mean, std, filter=filter)
    task = "object-detection"
    image, after = _steps(task, Boxes, labels, operations, options)
    row = (BATCH, "boxes")
    answers = (
        TensorSpec(after.label, DType.BYTES, row),
        TensorSpec(after.score, DType.FP32, row),
        TensorSpec(after.box, DType.FP32, (*row, 4)),
        TensorSpec(after.count, DType.INT32, (BATCH,)),
    )
    return _described(task, _whole(image), after, answers, (TensorSpec(after.given, DType.FP32, (BATCH,)),))


@options_checked
def image_segmentation(
    labels: Sequence[str],
    *,
    size: int | tuple[int, int] = 512,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    filter: Filter = "bilinear",  # noqa: A002 - as the operation calls it
    operations: Sequence[Operation] | None = None,
    queries: bool = False,
    **options: Any,
) -> Described:
    """Describe the steps of a segmentation: files of pictures in, and a mask of each class or segment as a PNG out.

    A picture may have as many pixels as its classes allow within some seconds of resizing: 14 million for 150 classes.
    With ``queries``, requests may choose in the inputs ``subtask``, ``threshold``, ``mask_threshold`` and
    ``overlap_mask_area_threshold``.

    Args:
        labels: the names of classes, in the order of the logits.
        size: as for :func:`object_detection`.
        mean: likewise.
        std: likewise.
        filter: likewise.
        operations: likewise.
        queries: whether the graph returns a class and a mask for each query, as MaskFormer does, instead of one plane
            for each class.
        options: fields of :class:`~ingot.steps.images.image.Image` and of :class:`~ingot.steps.after.masks.Masks`, or
            with ``queries`` of :class:`~ingot.steps.after.segments.Segments`.

    Raises:
        InvalidArgument: as for :func:`object_detection`.
    """
    most = min(Limits().pixels, MOST_RESIZED // max(1, len(labels)))
    options = {"limits": Limits(pixels=most), **options}
    if operations is None:
        operations = classifier(size, mean, std, filter=filter)
    task = "image-segmentation"
    if not queries:
        image, after = _steps(task, Masks, labels, operations, options)
        return _described(task, _whole(image), after, _masks(after, "labels"))
    image, segments = _steps(task, Segments, labels, operations, options)
    score = TensorSpec(segments.score, DType.FP32, (BATCH, "segments"))
    choices = [
        TensorSpec(name, DType.BYTES if name in segments.choices else DType.FP32, (BATCH,)) for name in segments.shared
    ]
    return _described(task, _whole(image), segments, (*_masks(segments, "segments"), score), choices)


def _masks(step: Masks | Segments, dimension: str) -> tuple[TensorSpec, ...]:
    row = (BATCH, dimension)
    return (
        TensorSpec(step.label, DType.BYTES, row),
        TensorSpec(step.mask, DType.BYTES, row),
        TensorSpec(step.count, DType.INT32, (BATCH,)),
    )


@options_checked
def depth_estimation(
    *,
    size: int | tuple[int, int] = 384,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    filter: Filter = "bicubic",  # noqa: A002 - as the operation calls it
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a model that estimates the depth of each pixel: files of pictures in, depths and a PNG out.

    Depths are resized (bicubic) to the size of each picture, which is the answer ``original_size``, height and width;
    those of a smaller picture of a request have zeros at the right and at the bottom.

    Args:
        size: as for :func:`object_detection`.
        mean: likewise.
        std: likewise.
        filter: likewise.
        operations: likewise.
        options: fields of :class:`~ingot.steps.images.image.Image` and of :class:`~ingot.steps.after.depth.Depth`.

    Raises:
        InvalidArgument: as for :func:`object_detection`.
    """
    if operations is None:
        operations = classifier(size, mean, std, filter=filter)
    task = "depth-estimation"
    before, others = split(task, {"size": "original_size", **options}, Image, Depth)
    image, after = Image(operations=tuple(operations), **before), Depth(size=before["size"], **others)
    answers = (
        TensorSpec(after.drawn, DType.BYTES, (BATCH,)),
        TensorSpec(after.resized, DType.FP32, (BATCH, "height", "width")),
        TensorSpec(image.size, DType.INT64, (BATCH, 2)),
    )
    return _described(task, _whole(image), after, answers)


@options_checked
def image_feature_extraction(
    shape: Sequence[int],
    *,
    output: str = "last_hidden_state",
    size: int | tuple[int, int] = 224,
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    operations: Sequence[Operation] | None = None,
    **options: Any,
) -> Described:
    """Describe the steps of a model that turns pictures into vectors, which are an output of the graph as it is.

    Args:
        shape: of the output for one picture.
        output: its name.
        size: as for :func:`image_classification`.
        mean: likewise.
        std: likewise.
        operations: likewise.
        options: fields of :class:`~ingot.steps.images.image.Image`.

    Raises:
        InvalidArgument: an option is wrong.
    """
    if operations is None:
        operations = classifier(size, mean, std)
    task = "image-feature-extraction"
    fields, _ = split(task, options, Image)
    answer = TensorSpec(output, DType.FP32, (BATCH, *shape))
    return _described(task, Image(operations=tuple(operations), **fields), None, (answer,))


def _steps(
    task: str, kind: type[_After], labels: Sequence[str], operations: Sequence[Operation], options: Mapping[str, Any]
) -> tuple[Image, _After]:
    """Return the steps before and after the graph, whose fields are options."""
    before, others = split(task, options, Image, kind)
    if not issubclass(kind, Classify):
        before.setdefault("size", "original_size")
    return Image(operations=tuple(operations), **before), kind.model_validate({**others, "labels": tuple(labels)})


def _whole(image: Image) -> Image:
    """Refuse declared operations after which a picture has other parts than before; those of others are as they are."""
    for operation in image.operations:
        if not image.reference and isinstance(operation, CenterCrop | Pad):
            raise InvalidArgument(
                f"the operation '{operation.operation}' changes which part of a picture the graph sees, but boxes "
                "and masks must relate to the whole picture: only resize it"
            )
    return image


def _described(
    task: str,
    image: Image,
    after: AnyStep | None,
    answers: Sequence[TensorSpec],
    choices: Sequence[TensorSpec] = (),
) -> Described:
    inputs = (TensorSpec(image.image, DType.BYTES, (BATCH,)), *choices)
    optional = [spec.name for spec in choices]
    last = (after,) if after else ()
    return described(task, inputs, image, last, answers, optional=optional, max_items=_MOST_ITEMS)
