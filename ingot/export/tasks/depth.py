"""Models of depth in folders of transformers: the depth of each pixel as transformers' pipeline estimates it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found
from ingot.export.tasks.pictures import FILE, Answer, Processor
from ingot.steps import Described, Values, depth_estimation
from ingot.steps.after.pixels import png

_DEPTHS = "predicted_depth"
# Processors after which depths relate to the whole picture, and are resized (bicubic) to its size.
_WHOLE = ("DPT", "GLPN", "PromptDepthAnything")


def find_depth(folder: Folder, *, named: bool) -> Found | None:
    """Return a model of depth that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForDepthEstimation") or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("depth-estimation", f"a model ...ForDepthEstimation and {FILE}")
        return None
    return Found("depth-estimation", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a model of depth.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor is not one whose depths are known, or Pillow is not installed.
    """
    processor = Processor(folder)
    if processor.kind not in _WHOLE:
        raise Unsupported(
            f"how {type(processor.own).__name__} resizes depths is not known, only how those of {', '.join(_WHOLE)} do"
            ": send tensors"
        )
    described = depth_estimation(operations=processor.operations, reference=processor.name)
    return replace(described, original=processor.original(_answer(processor)), inputs=processor.inputs(module.config))


def _answer(processor: Processor) -> Answer:
    def answer(module: Any, values: Values) -> Values:
        pipeline = processor.pipeline("DepthEstimationPipeline", module)
        rows = [pipeline(picture) for picture in processor.upright(values)]
        sizes = np.array([row[_DEPTHS].shape for row in rows])
        found = np.zeros((len(rows), *sizes.max(axis=0)), np.float32)
        files = np.empty(len(rows), object)
        for index, (row, (height, width)) in enumerate(zip(rows, sizes, strict=True)):
            found[index, :height, :width], files[index] = row[_DEPTHS], png(np.asarray(row["depth"]))
        return {_DEPTHS: found, "depth": files, "original_size": sizes}

    return answer
