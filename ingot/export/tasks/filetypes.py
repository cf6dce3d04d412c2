"""Models of magika in the folders of its package: types of files, as the package itself answers."""

from __future__ import annotations

import importlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import missing_package
from ingot.export.tasks.folder import read_json
from ingot.steps import Described, Original, Values, file_classification
from ingot.steps.samples.files import sample_files
from ingot.tensors.arrays import as_bytes

FILE = "config.min.json"


def of_magika(folder: Path) -> Described:
    """Describe the steps of a model of magika, proved against the installed package.

    Args:
        folder: one with ``config.min.json``, such as ``models/standard_v3_3`` of the package.

    Raises:
        Unsupported: the package is not installed, which knows the types that are texts.
    """
    try:
        magika: Any = importlib.import_module("magika")
    except ModuleNotFoundError as error:
        raise missing_package("magika", f"a folder with {FILE}", None) from error
    own, config = magika.Magika(model_dir=folder), read_json(folder / FILE)
    labels = config["target_labels_space"]
    types = read_json(Path(magika.__file__).parent / "config" / "content_types_kb.min.json")
    names = {*labels, *config["overwrite_map"].values()}
    described = file_classification(
        labels,
        texts=[name for name in names if types[name]["is_text"]],
        replaced=config["overwrite_map"],
        thresholds=config["thresholds"],
        threshold=config["medium_confidence_threshold"],
        first=config["beg_size"],
        last=config["end_size"],
        block=config["block_size"],
        padding=config["padding_token"],
        least=config["min_file_size_for_dl"],
        max_items=1,  # the files of a call change each other's scores, by .17 in the samples
    )
    samples = [{"file": as_bytes([content])} for content in sample_files()]
    original = Original(
        f"magika {magika.__version__} {folder.name}", _prepare(own, config), _answer(own), samples, samples
    )
    return replace(described, original=original)


def _prepare(own: Any, config: Any) -> Any:
    seekable: Any = importlib.import_module("magika.types").Seekable
    names = ("beg_size", "mid_size", "end_size", "padding_token", "block_size", "use_inputs_at_offsets")
    options = {name: config[name] for name in names}

    def prepare(values: Values) -> Values:
        found = [own._extract_features_from_seekable(seekable(io.BytesIO(file)), **options) for file in values["file"]]
        return {"bytes": np.array([[*each.beg, *each.end] for each in found], np.int32)}

    return prepare


def _answer(own: Any) -> Any:
    def answer(module: Any, values: Values) -> Values:
        found = [own.identify_bytes(file) for file in values["file"]]
        labels = as_bytes([str(each.output.label).encode() for each in found])
        return {"label": labels[:, None], "score": np.array([[each.score] for each in found], np.float32)}

    return answer
