"""Models of pictures without a head in folders of transformers: hidden states as transformers' pipeline has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import Unsupported
from ingot.export.tasks.folder import Folder, Found
from ingot.export.tasks.pictures import FILE, Answer, Processor, sides_of
from ingot.steps import Described, Values, image_feature_extraction

_OUTPUT = "last_hidden_state"


def find_features(folder: Folder, *, named: bool) -> Found | None:
    """Return a model without a head that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("Model") or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("image-feature-extraction", f"a model ...Model and {FILE}")
        return None
    return Found("image-feature-extraction", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a model whose answer are its last hidden states.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the model reads more than pictures, or pictures of several sizes; the processor does what no
            operation stands for; or Pillow is not installed.
    """
    if getattr(module, "main_input_name", "") != "pixel_values":
        raise Unsupported(f"{type(module).__name__} reads more than pictures: send tensors")
    processor = Processor(folder)
    sides = sides_of(processor.operations)
    if sides is None or not all(isinstance(side, int) for side in sides):
        raise Unsupported(f"{processor.name} gives pictures several sizes, of which features have no one shape")
    described = image_feature_extraction(
        _shape(module, sides), operations=processor.operations, reference=processor.name, output=_OUTPUT
    )
    return replace(described, original=processor.original(_answer(processor)), inputs=processor.inputs(module.config))


def _shape(module: Any, sides: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of the hidden states of a picture."""
    import torch

    pixels = torch.zeros((1, getattr(module.config, "num_channels", 3), *sides), device=module.device)
    with torch.no_grad():
        return tuple(module(pixel_values=pixels)[_OUTPUT].shape[1:])


def _answer(processor: Processor) -> Answer:
    def answer(module: Any, values: Values) -> Values:
        pipeline = processor.pipeline("ImageFeatureExtractionPipeline", module)
        rows = [pipeline(picture)[0] for picture in processor.upright(values)]
        return {_OUTPUT: np.array(rows, np.float32)}

    return answer
