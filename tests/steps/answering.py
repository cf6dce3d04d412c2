"""Archives of small graphs with the steps of each task, whose answers follow from the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ingot.model_store import Archive
from ingot.steps import (
    Described,
    depth_estimation,
    fill_mask,
    image_segmentation,
    object_detection,
    question_answering,
    token_classification,
)
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.steps.bert import tokenizer_file, vocabulary

TOKENS = ("batch", "seq")
PIXELS = ("batch", 3, 8, 8)
_KINDS = {DType.INT64: TensorProto.INT64, DType.FP32: TensorProto.FLOAT}


def detector(folder: Path) -> Archive:
    """Finds two boxes in each picture: the left half is a cat, and the middle a dog, less certain."""
    logits = np.array([[[4, 0, 0], [0, 2, 0]]], np.float32)
    boxes = np.array([[[0.25, 0.5, 0.5, 1], [0.5, 0.5, 0.5, 0.5]]], np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Unsqueeze", ["nothing", "places"], ["zeros"]),
        helper.make_node("Add", ["zeros", "classes"], ["logits"]),
        helper.make_node("Add", ["zeros", "corners"], ["pred_boxes"]),
    ]
    constants = {
        "axes": np.array([1, 2, 3]),
        "places": np.array([1, 2]),
        "zero": np.float32(0),
        "classes": logits,
        "corners": boxes,
    }
    described = object_detection(["cat", "dog"], size=8, mean=(0, 0, 0), std=(1, 1, 1), background=True)
    outputs = {"logits": ("batch", 2, 3), "pred_boxes": ("batch", 2, 4)}
    return _archive(folder, "detector", described, _pixels(), outputs, nodes, constants)


def segmenter(folder: Path) -> Archive:
    """Divides a picture into what is red and the rest."""
    nodes = [
        helper.make_node("Slice", ["pixel_values", "start", "end", "axis"], ["red"]),
        helper.make_node("Mul", ["red", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "half"], ["rest"]),
        helper.make_node("Concat", ["red", "rest"], ["logits"], axis=1),
    ]
    constants = {
        "start": np.array([0]),
        "end": np.array([1]),
        "axis": np.array([1]),
        "zero": np.float32(0),
        "half": np.float32(0.5),
    }
    described = image_segmentation(["red", "rest"], size=8, mean=(0, 0, 0), std=(1, 1, 1))
    return _archive(folder, "segmenter", described, _pixels(), {"logits": ("batch", 2, 8, 8)}, nodes, constants)


def ranger(folder: Path) -> Archive:
    """Takes what is red for far away."""
    nodes = [helper.make_node("Gather", ["pixel_values", "first"], ["predicted_depth"], axis=1)]
    described = depth_estimation(size=8, mean=(0, 0, 0), std=(1, 1, 1))
    outputs = {"predicted_depth": ("batch", 8, 8)}
    return _archive(folder, "ranger", described, _pixels(), outputs, nodes, {"first": np.array(0)})


def finder(folder: Path) -> Archive:
    """Finds the word "film" in texts."""
    table = np.zeros((len(vocabulary()), 2), np.float32)
    table[:, 0] = 3
    table[_id("film")] = 0, 6
    described = token_classification(tokenizer_file(), ["O", "B-WORK"], max_length=16)
    return _by_token(folder, "finder", described, {"logits": table})


def reader(folder: Path) -> Archive:
    """Answers each question with the word "film" of the context, up to "story"."""
    first, last = (np.zeros(len(vocabulary()), np.float32) for _ in range(2))
    first[_id("film")] = last[_id("story")] = 8
    described = question_answering(tokenizer_file(), max_length=16, stride=2)
    return _by_token(folder, "reader", described, {"start_logits": first, "end_logits": last})


def filler(folder: Path) -> Archive:
    """Fills each mask with "film", or else with "story"."""
    table = np.zeros((len(vocabulary()), len(vocabulary())), np.float32)
    table[_id("[MASK]"), [_id("film"), _id("story")]] = 9, 8
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer_file().decode())
    tokenizer.add_special_tokens(["[MASK]"])
    described = fill_mask(tokenizer.to_str().encode(), _id("[MASK]"), top_k=2, max_length=16)
    return _by_token(folder, "filler", described, {"logits": table})


def _id(word: str) -> int:
    return vocabulary().index(word)


def _pixels() -> Sequence[TensorSpec]:
    return (TensorSpec("pixel_values", DType.FP32, PIXELS),)


def _by_token(folder: Path, name: str, described: Described, tables: Mapping[str, Array]) -> Archive:
    """Return an archive of a graph that looks each token up in a table for each output."""
    nodes = [helper.make_node("Mul", ["input_ids", "attention_mask"], ["seen"])]
    nodes += [helper.make_node("Gather", [f"table of {output}", "seen"], [output]) for output in tables]
    inputs = [TensorSpec(name, DType.INT64, TOKENS) for name in ("input_ids", "attention_mask")]
    outputs = {output: (*TOKENS, *table.shape[1:]) for output, table in tables.items()}
    constants = {f"table of {output}": table for output, table in tables.items()}
    return _archive(folder, name, described, inputs, outputs, nodes, constants)


def _archive(
    folder: Path,
    name: str,
    described: Described,
    inputs: Sequence[TensorSpec],
    outputs: Mapping[str, tuple[str | int, ...]],
    nodes: Sequence[NodeProto],
    constants: Mapping[str, Any],
) -> Archive:
    graph = onnx_models.save(
        folder / f"{name}.onnx",
        nodes,
        [(spec.name, _KINDS[spec.dtype], spec.shape) for spec in inputs],
        [(output, TensorProto.FLOAT, shape) for output, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), constant) for constant, value in constants.items()],
    )
    texts = inputs[0].dtype is DType.INT64
    specs = tuple(TensorSpec(output, DType.FP32, shape) for output, shape in outputs.items())
    ranges = {"seq": Range(1, 16)} if texts else {}
    signature = Signature(tuple(inputs), specs, "batch", ranges)
    padding = {"seq": Padding({spec.name: 0 for spec in inputs})} if texts else {}
    return archive_of(name, graph.read_bytes(), signature, (), described.files, padding=padding, steps=described.steps)
