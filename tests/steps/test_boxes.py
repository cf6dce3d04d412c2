"""Boxes of detectors: equal to those of transformers' processors, with non-maximum suppression and padding."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import InvalidArgument
from ingot.steps import Values, object_detection
from ingot.steps.after.boxes import Boxes
from ingot.steps.images.operations import CenterCrop
from ingot.steps.tasks.declared import read_steps
from ingot.tensors import DType, TensorSpec

LABELS = tuple(f"label{index}" for index in range(5))
SIZES = np.array([[480, 640], [37, 211], [1, 9]])


def outputs(classes: int, queries: int = 20, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "logits": random.standard_normal((3, queries, classes)).astype(np.float32) * 3,
        "pred_boxes": random.random((3, queries, 4), np.float32),
        "original_size": SIZES,
    }


def apply(step: Boxes, values: Values) -> Values:
    return step.open(lambda name: b"")(values)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("detr.Detr", Boxes(labels=LABELS, background=True)),
        ("yolos.Yolos", Boxes(labels=LABELS, background=True, threshold=0.7)),
        ("deformable_detr.DeformableDetr", Boxes(labels=LABELS, function="sigmoid", top_k=100)),
        ("conditional_detr.ConditionalDetr", Boxes(labels=LABELS, function="sigmoid", top_k=100)),
        ("rt_detr.RTDetr", Boxes(labels=LABELS, function="sigmoid", top_k=20)),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_boxes_equal_those_of_transformers_processors(name: str, step: Boxes) -> None:
    module, kind = name.split(".")
    found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    processor = getattr(found, f"{kind}ImageProcessorPil")()
    values = outputs(len(LABELS) + step.background)
    tensors = SimpleNamespace(**{key: torch.from_numpy(values[key]) for key in ("logits", "pred_boxes")})
    expected = processor.post_process_object_detection(tensors, step.threshold, torch.from_numpy(SIZES))
    answers = apply(step, values)
    assert answers["count"].tolist() == [len(each["scores"]) for each in expected]
    assert answers["count"].min() > 2
    for index, each in enumerate(expected):
        place = index, slice(len(each["scores"]))
        assert answers["label"][place].tolist() == [LABELS[label].encode() for label in each["labels"]]
        assert answers["score"][place] == pytest.approx(each["scores"].numpy(), abs=1e-6)
        assert answers["box"][place] == pytest.approx(each["boxes"].numpy(), abs=1e-3)


def test_behind_the_count_there_is_nothing() -> None:
    answers = apply(Boxes(labels=LABELS, background=True, threshold=0.9), outputs(6))
    counts = answers["count"]
    assert answers["label"].shape == (3, counts.max())
    assert answers["box"].shape == (3, counts.max(), 4)
    fewest = int(counts.argmin())
    assert counts[fewest] < counts.max()
    assert set(answers["label"][fewest, counts[fewest] :]) == {b""}
    assert not answers["score"][fewest, counts[fewest] :].any()
    nothing = apply(Boxes(labels=LABELS, background=True, threshold=1), outputs(6))
    assert nothing["label"].shape == (3, 0)
    assert nothing["count"].tolist() == [0, 0, 0]


def test_requests_may_have_another_threshold() -> None:
    step = Boxes(labels=LABELS, background=True)
    values = outputs(6)
    assert apply(step, {**values, "threshold": np.zeros(1, np.float32)})["count"].tolist() == [20] * 3
    each = apply(step, {**values, "threshold": np.array([0, 1, 0.5], np.float32)})
    assert each["count"].tolist() == [20, 0, apply(step, values)["count"][2]]
    with pytest.raises(InvalidArgument, match="input 'threshold' is not a number"):
        apply(step, {**values, "threshold": np.full(1, np.nan, np.float32)})


def test_overlapping_boxes_of_a_class_are_dropped() -> None:
    """As ``torchvision.ops.batched_nms`` does; the sizes of the boxes are pixels of a graph's input of 100 x 200."""
    corners = np.array([[0, 0, 100, 50], [5, 0, 100, 50], [5, 0, 100, 50], [100, 50, 200, 100]], np.float32)
    scores = np.array([[0.6, 0], [0.9, 0], [0, 0.8], [0.7, 0]], np.float32)
    values = {"logits": scores[None], "pred_boxes": corners[None], "original_size": np.array([[200, 400]])}
    step = Boxes(labels=("cat", "dog"), function="none", form="xyxy", extent=(100, 200), overlap=0.5)
    answers = apply(step, values)
    assert answers["label"].tolist() == [[b"cat", b"dog", b"cat"]]
    assert answers["box"][0].tolist() == [[10, 0, 200, 100], [10, 0, 200, 100], [200, 100, 400, 200]]
    assert apply(step.model_copy(update={"overlap": 0.96}), values)["count"].tolist() == [4]
    assert apply(step.model_copy(update={"max_boxes": 1}), values)["label"].tolist() == [[b"cat"]]


def test_what_does_not_fit_the_graph_is_refused() -> None:
    step = Boxes(labels=LABELS, background=True)
    known: dict[str, TensorSpec | None] = {
        "logits": TensorSpec("logits", DType.FP32, ("batch", 20, 5)),
        "pred_boxes": TensorSpec("pred_boxes", DType.FP32, ("batch", 20, 4)),
        "original_size": None,
    }
    with pytest.raises(InvalidArgument, match="step 'boxes' has 5 labels, but 'logits' has 4 classes"):
        step.check(known)
    known["logits"], known["pred_boxes"] = None, TensorSpec("pred_boxes", DType.FP32, ("batch", 20, 5))
    with pytest.raises(InvalidArgument, match=r"needs 'pred_boxes' of the shape \[batch, queries, 4\], but it has"):
        step.check(known)
    with pytest.raises(InvalidArgument, match="the operation 'center_crop' changes which part of a picture"):
        object_detection(LABELS, operations=[CenterCrop(height=8, width=8)])


def test_steps_are_declared_in_a_file(tmp_path: Any) -> None:
    file = tmp_path / "steps.toml"
    file.write_text('task = "object-detection"\nlabels = ["cat"]\nsize = 64\nfunction = "sigmoid"\noverlap = 0.5')
    described = read_steps(file)
    assert described == object_detection(["cat"], size=64, function="sigmoid", overlap=0.5)
    assert described.steps.optional == ("threshold",)
    file.write_text('task = "object-detection"\nlabels = ["cat"]\ntop_p = 3')
    with pytest.raises(
        InvalidArgument, match=r"'top_p' is not an option of the task object-detection: kind, .*, top_k"
    ):
        read_steps(file)
