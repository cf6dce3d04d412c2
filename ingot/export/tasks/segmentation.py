"""Semantic segmentations in folders of transformers: masks as transformers' pipeline makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found, labels_of
from ingot.export.tasks.pictures import FILE, Answer, Processor
from ingot.steps import Described, Values, image_segmentation
from ingot.steps.after.masks import png
from ingot.steps.ragged import columns

_SEMANTIC = "ForSemanticSegmentation"
# Segmentations into instances, whose masks no step makes.
_OTHERS = ("ForUniversalSegmentation", "ForInstanceSegmentation", "ForSegmentation", "ForImageSegmentation")


def find_segmentation(folder: Folder, *, named: bool) -> Found | None:
    """Return a segmentation that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith((_SEMANTIC, *_OTHERS)) or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("image-segmentation", f"a model ...{_SEMANTIC} and {FILE}")
        return None
    return Found("image-segmentation", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a semantic segmentation.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the model divides a picture into instances, the processor does what no operation stands for, or
            Pillow is not installed.
    """
    if not type(module).__name__.endswith(_SEMANTIC):
        raise Unsupported(
            f"{type(module).__name__} divides a picture into instances, for which there is no step; there is one for "
            f"models ...{_SEMANTIC}: send tensors"
        )
    processor = Processor(folder)
    labels = labels_of(module.config)
    described = image_segmentation(labels, operations=processor.operations, reference=processor.name)
    return replace(described, original=processor.original(_answer(processor)), inputs=processor.inputs(module.config))


def _answer(processor: Processor) -> Answer:
    def answer(module: Any, values: Values) -> Values:
        pipeline = processor.pipeline("ImageSegmentationPipeline", module)
        rows = [pipeline(picture) for picture in processor.upright(values)]
        return columns(
            rows,
            {
                "label": (lambda item: item["label"].encode(), object),
                "mask": (lambda item: png(np.asarray(item["mask"]) > 0), object),
            },
        )

    return answer
