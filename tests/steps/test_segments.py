"""Segments and depths: equal to those of transformers' processors."""

from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from ingot.errors import InvalidArgument, TooLarge
from ingot.steps import depth_estimation, image_segmentation
from ingot.steps.after.depth import Depth
from ingot.steps.after.pixels import png
from ingot.steps.after.segments import SUBTASKS, Segments
from ingot.tensors import DType, TensorSpec

LABELS = tuple(f"label{index}" for index in range(5))
SIZES = np.array([[40, 31], [9, 70], [200, 301]])
RANDOM = np.random.default_rng(0)


def values(queries: int = 9, **given: Any) -> dict[str, Any]:
    classes = 4 * RANDOM.standard_normal((3, queries, 6)).astype(np.float32)
    masks = 4 * RANDOM.standard_normal((3, queries, 8, 6)).astype(np.float32)
    given = {
        name: np.array([value], object if isinstance(value, bytes) else np.float32) for name, value in given.items()
    }
    return {"class_queries_logits": classes, "masks_queries_logits": masks, "original_size": SIZES, **given}


def processor(name: str) -> Any:
    import transformers

    return getattr(transformers, f"{name}ImageProcessorPil")()


FAMILIES: dict[str, dict[str, Any]] = {
    "Detr": {},
    "MaskFormer": {"pairs": True},
    "Mask2Former": {"pairs": True, "resized": (384, 384)},
}


@pytest.mark.parametrize("subtask", SUBTASKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_segments_equal_those_of_transformers_processors(
    name: str, subtask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = values(subtask=subtask.encode(), threshold=0.4, overlap_mask_area_threshold=0.1)
    answers = Segments(labels=LABELS, **FAMILIES[name]).open(lambda name: b"")(inputs)
    outputs = {each: torch.from_numpy(inputs[each]) for each in ("class_queries_logits", "masks_queries_logits")}
    outputs |= {"logits": outputs["class_queries_logits"], "pred_masks": outputs["masks_queries_logits"]}
    topk = torch.Tensor.topk  # the processor leaves the order open
    monkeypatch.setattr(torch.Tensor, "topk", lambda tensor, count, **_: topk(tensor, count, sorted=True))
    own, options = processor(name), {"threshold": 0.4, "overlap_mask_area_threshold": 0.1}
    if subtask == "semantic":
        options = {}
    given: Any = SimpleNamespace(**outputs)
    expected = getattr(own, f"post_process_{subtask}_segmentation")(given, target_sizes=SIZES.tolist(), **options)
    assert answers["count"].sum() > 3
    for index, found in enumerate(expected):
        if subtask == "semantic":
            numbers = np.unique(found)
            segments = [{"id": number, "label_id": number, "score": 0} for number in numbers]
            found = {"segmentation": found, "segments_info": segments}
        count = answers["count"][index]
        assert count == len(found["segments_info"])
        for place, segment in enumerate(found["segments_info"]):
            assert answers["label"][index, place].decode() == LABELS[segment["label_id"]]
            assert answers["score"][index, place] == pytest.approx(segment["score"], abs=2e-6)
            mask = Pillow.open(BytesIO(answers["mask"][index, place]))
            assert mask.size == (SIZES[index, 1], SIZES[index, 0])
            wanted = found["segmentation"].numpy() == segment["id"]
            assert ((np.asarray(mask) > 0) != wanted).sum() <= wanted.size // 10_000


def test_choices_are_checked() -> None:
    step = Segments(labels=LABELS).open(lambda name: b"")
    assert step(values(threshold=1))["mask"].shape == (3, 0)
    with pytest.raises(InvalidArgument, match="'subtask' is 'all'; send one of: panoptic, instance, semantic"):
        step(values(subtask=b"all"))
    with pytest.raises(InvalidArgument, match="'mask_threshold' is not a number"):
        step(values(mask_threshold=np.nan))
    inputs = {**values(), "original_size": np.array([[20_000, 10_000]] * 3)}
    with pytest.raises(TooLarge, match="pixels times queries or classes, over the limit"):
        step(inputs)


def test_labels_fit_and_a_golden_keeps_what_machines_reproduce() -> None:
    known: dict[str, TensorSpec | None] = {"class_queries_logits": TensorSpec("x", DType.FP32, ("batch", 9, 9))}
    with pytest.raises(InvalidArgument, match="step 'segments' has 5 labels, but 'class_queries_logits' has 8 classes"):
        Segments(labels=LABELS).check(known)
    described = image_segmentation(LABELS, queries=True, logits="logits", masks="pred_masks", threshold=0.3)
    [step] = described.steps.after
    assert isinstance(step, Segments)
    assert step.threshold == 0.3
    assert described.steps.optional == ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold")
    answers = step.open(lambda name: b"")(
        {**(found := values()), "logits": found["class_queries_logits"], "pred_masks": found["masks_queries_logits"]}
    )
    assert step.comparable(answers).keys() == {"mask", "count"}


def test_depths_equal_those_of_transformers_processors() -> None:
    depths = RANDOM.standard_normal((3, 12, 9)).astype(np.float32)
    answers = Depth().open(lambda name: b"")({"predicted_depth": depths, "original_size": SIZES})
    given: Any = SimpleNamespace(predicted_depth=torch.from_numpy(depths))
    expected = processor("DPT").post_process_depth_estimation(given, SIZES.tolist())
    assert answers["predicted_depth"].shape == (3, 200, 301)
    for index, (height, width) in enumerate(SIZES):
        wanted = expected[index]["predicted_depth"].numpy()
        own = answers["predicted_depth"][index, :height, :width]
        assert np.abs(own - wanted).max() < 2e-5
        assert not answers["predicted_depth"][index, height:].any()
        levels = (wanted - wanted.min()) / (wanted.max() - wanted.min()) * 255
        drawn = np.asarray(Pillow.open(BytesIO(answers["depth"][index]))).astype(int)
        assert np.abs(drawn - levels.astype(np.uint8)).max() <= 1


def test_flat_depths_are_black_and_requests_are_bounded() -> None:
    step = Depth().open(lambda name: b"")
    flat = step({"predicted_depth": np.ones((1, 4, 4), np.float32), "original_size": np.array([[3, 5]])})
    assert flat["depth"][0] == png(np.zeros((3, 5), np.uint8))
    with pytest.raises(TooLarge, match="2 x 9000 x 9000 pixels once they have one size; the most are 67108864: divide"):
        step({"predicted_depth": np.ones((2, 4, 4), np.float32), "original_size": np.array([[9000, 1], [1, 9000]])})
    outputs = {spec.name: spec.shape for spec in depth_estimation(size=16).steps.outputs}
    assert outputs == {
        "depth": ("batch",),
        "predicted_depth": ("batch", "height", "width"),
        "original_size": ("batch", 2),
    }
