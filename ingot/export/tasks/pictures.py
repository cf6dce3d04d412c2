"""Classifiers of pictures in folders of transformers: the steps of their image processor, and what these must equal."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument, missing_package
from ingot.export.program import quiet
from ingot.export.tasks.folder import Folder, Found
from ingot.steps import Described, Original, Values, image_classification
from ingot.steps.images.pictures import drawn
from ingot.steps.images.processors import operations_of
from ingot.tensors import Array

FILE = "preprocessor_config.json"
# Pictures whose values are compared, and those whose answers are; narrow ones are for the tests of the steps.
_HARD, _SAMPLES, _LEAST = 60, 50, 24


def find_classifier(folder: Folder, *, named: bool) -> Found | None:
    """Return a classifier of pictures that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForImageClassification") or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("image-classification", f"a model ...ForImageClassification and {FILE}")
        return None
    return Found("image-classification", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a classifier of pictures.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor does what no operation stands for, or Pillow is not installed.
    """
    processor, name = _processor(folder)
    config = module.config
    labels = [str(config.id2label[index]) for index in range(config.num_labels)]
    # As transformers' pipeline chooses it.
    several = config.problem_type == "multi_label_classification" or config.num_labels == 1
    function: Literal["softmax", "sigmoid", "none"] = "sigmoid" if several else "softmax"
    if config.problem_type == "regression":
        function = "none"
    described = image_classification(labels, operations=operations_of(processor), function=function, reference=name)
    return replace(described, original=_original(processor, name))


def _processor(folder: Path) -> tuple[Any, str]:
    """Return the folder's processor with Pillow's backend, and its name with the version of transformers."""
    import transformers

    try:
        import PIL  # noqa: F401 - transformers would load a processor that fails
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "exporting a model with its image processor", "images") from error

    def unread(error: Exception) -> str:
        return f"the image processor in {folder} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet():
        loader: Any = transformers.AutoImageProcessor  # whose methods have no types
        found = loader.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    return found, f"transformers {transformers.__version__} {type(found).__name__}"


def _original(processor: Any, name: str) -> Original:
    def prepare(values: Values) -> Values:
        found = processor([*map(_upright, values["image"].tolist())], return_tensors="np")
        return {"pixel_values": np.asarray(found["pixel_values"])}

    def answer(module: Any, values: Values) -> Values:
        import transformers

        kind: Any = transformers.ImageClassificationPipeline
        pipeline = kind(model=module, image_processor=processor, device="cpu")
        rows = pipeline([*map(_upright, values["image"].tolist())], top_k=module.config.num_labels)
        label = np.array([[item["label"].encode() for item in row] for row in rows], object)
        return {"label": label, "score": np.array([[item["score"] for item in row] for row in rows], np.float32)}

    items, samples = drawn(_HARD, least=_LEAST), drawn(_SAMPLES, seed=1, least=_LEAST)
    return Original(name, prepare, answer, [{"image": _array(items)}], [{"image": _array(samples)}])


def _array(files: Any) -> Array:
    contents = [*files]
    array = np.empty(len(contents), object)
    array[:] = contents
    return array


def _upright(content: bytes) -> Any:
    """Return a picture as transformers loads it, but on white: its pipeline would show what transparency hides."""
    from PIL import Image, ImageOps
    from transformers.image_transforms import convert_to_rgb

    picture: Any = convert_to_rgb(ImageOps.exif_transpose(Image.open(BytesIO(content))), return_numpy=True)
    return Image.fromarray(picture)
