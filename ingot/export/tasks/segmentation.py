"""Segmentations in folders of transformers: masks as transformers' pipeline makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found, labels_of
from ingot.export.tasks.pictures import FILE, Answer, Processor
from ingot.steps import Described, Values, image_segmentation
from ingot.steps.after.pixels import png
from ingot.steps.ragged import columns

_SEMANTIC = "ForSemanticSegmentation"
_QUERIES = ("ForUniversalSegmentation", "ForInstanceSegmentation", "ForSegmentation")
_DETR = {"logits": "logits", "masks": "pred_masks"}
# How the segments of queries are chosen, by the name of the processor.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Detr": _DETR,
    "ConditionalDetr": _DETR,
    "MaskFormer": {"pairs": True},
    "Mask2Former": {"pairs": True, "resized": (384, 384)},
}
# Further inputs of the samples that are compared. Few segments have a score above the default threshold, so half of the
# samples have a threshold of 0.
_OPTIONS: Sequence[Mapping[str, Any]] = (
    {"threshold": 0.0},
    {"threshold": 0.0, "subtask": b"instance"},
    {"subtask": b"semantic"},
    {},
)


def find_segmentation(folder: Folder, *, named: bool) -> Found | None:
    """Return a segmentation that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith((_SEMANTIC, *_QUERIES)) or not (folder.path / FILE).is_file():
        if named:
            kinds = " or ...".join((_SEMANTIC, *_QUERIES))
            raise folder.needs("image-segmentation", f"a model ...{kinds}, and {FILE}")
        return None
    return Found("image-segmentation", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a segmentation.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor chooses segments by rules that are not known, it prepares pictures in a way that no
            operation has, or Pillow is not installed.
    """
    semantic = type(module).__name__.endswith(_SEMANTIC)
    processor = Processor(folder)
    if not semantic and processor.kind not in _FAMILIES:
        raise Unsupported(
            f"how {type(processor.own).__name__} chooses segments is not known, only how those of "
            f"{', '.join(_FAMILIES)} do: send tensors"
        )
    options = {} if semantic else {"queries": True, **_FAMILIES[processor.kind]}
    described = image_segmentation(
        labels_of(module.config), operations=processor.operations, reference=processor.name, **options
    )
    # Rounding may decide the class of single pixels; in enlarged pictures they are a smaller share.
    original = processor.original(_answer(processor, semantic), *(() if semantic else _OPTIONS), enlarged=3)
    return replace(described, original=original, inputs=processor.inputs(module.config))


def _answer(processor: Processor, semantic: bool) -> Answer:
    """Return a function that computes the original's answers by the pipeline of transformers."""
    scores = {} if semantic else {"score": (lambda item: item["score"] or 0, np.float32)}

    def answer(module: Any, values: Values) -> Values:
        pipeline, pictures = processor.pipeline("ImageSegmentationPipeline", module), processor.upright(values)
        chosen = [{"subtask": "semantic"} if semantic else _chosen(values, index) for index in range(len(pictures))]
        with _sorted_topk():
            rows = [pipeline(picture, **options) for picture, options in zip(pictures, chosen, strict=True)]
        return columns(
            rows,
            {
                "label": (lambda item: item["label"].encode(), object),
                "mask": (lambda item: png(np.asarray(item["mask"])), object),
                **scores,
            },
        )

    return answer


def _chosen(values: Values, index: int) -> dict[str, Any]:
    """Return the pipeline's parameters for one sample."""
    found = {name: array[index] for name, array in values.items() if name != "image"}
    return {name: value.decode() if isinstance(value, bytes) else float(value) for name, value in found.items()}


def _sorted_topk() -> Any:
    """Return a context in which ``topk`` returns its elements in descending order.

    MaskFormer's processor does not ask for an order of its pairs, but the order decides which of two instances covers
    the other.
    """
    from torch.overrides import TorchFunctionMode

    class Sorted(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {**(kwargs or {})}
            if getattr(function, "__name__", "") == "topk":
                kwargs["sorted"] = True
            return function(*args, **kwargs)

    return Sorted()
