"""Detectors in folders of transformers: boxes as their image processor and transformers' pipeline make them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found, labels_of
from ingot.export.tasks.pictures import FILE, Answer, Processor
from ingot.steps import Described, Values, object_detection
from ingot.steps.after.boxes import Boxes
from ingot.steps.images.operations import Pad
from ingot.steps.ragged import columns

_MASK = "pixel_mask"
_QUERIES = {"function": "softmax", "background": True}
_PAIRS = {"function": "sigmoid", "top_k": 100}
# How the processors choose boxes, by their name.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Detr": _QUERIES,
    "Yolos": _QUERIES,
    "ConditionalDetr": _PAIRS,
    "DeformableDetr": _PAIRS,
    "RTDetr": {"function": "sigmoid"},  # the best pairs, as many as there are queries
}


def find_detector(folder: Folder, *, named: bool) -> Found | None:
    """Return a detector that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForObjectDetection") or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("object-detection", f"a model ...ForObjectDetection and {FILE}")
        return None
    return Found("object-detection", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a detector.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor is not one whose boxes are known, or Pillow is not installed.
    """
    processor, config = Processor(folder), module.config
    if processor.kind not in _FAMILIES:
        raise Unsupported(
            f"how {type(processor.own).__name__} chooses boxes is not known, only how those of {', '.join(_FAMILIES)} "
            "do: declare the steps by hand, or send tensors"
        )
    options = {"top_k": config.num_queries} if processor.kind == "RTDetr" else {}
    options |= _FAMILIES[processor.kind]
    operations, mask = processor.operations, ""
    if processor.own.do_pad and _MASK in inspect.signature(module.forward).parameters:
        mask = options["pixel_mask"] = _MASK
        if isinstance(operations[-1], Pad):
            options["padded"] = operations[-1].height, operations[-1].width
            operations = operations[:-1]
    described = object_detection(labels_of(config), operations=operations, reference=processor.name, **options)
    # Few scores of a model are above its threshold, so half of the samples compare all boxes.
    original = processor.original(_answer(processor, described), {"threshold": 0.0}, {})
    return replace(described, original=original, inputs=processor.inputs(config, mask))


def _answer(processor: Processor, described: Described) -> Answer:
    [default] = [step.threshold for step in described.steps.after if isinstance(step, Boxes)]

    def answer(module: Any, values: Values) -> Values:
        exact = {"_get_bounding_box": lambda self, box: box.tolist()}  # the pipeline would cut fractions off
        pipeline = processor.pipeline("ObjectDetectionPipeline", module, **exact)
        thresholds = values.get("threshold", np.full(len(values["image"]), default))
        pairs = zip(processor.upright(values), thresholds.tolist(), strict=True)
        rows = [pipeline(picture, threshold=threshold) for picture, threshold in pairs]
        return columns(
            rows,
            {
                "label": (lambda item: item["label"].encode(), object),
                "score": (itemgetter("score"), np.float32),
                "box": (itemgetter("box"), np.dtype((np.float32, 4))),
            },
        )

    return answer
