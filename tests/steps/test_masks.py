"""Masks of semantic segmentations: equal to those of transformers and PyTorch, as PNG files."""

from __future__ import annotations

import zlib
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from ingot.errors import InvalidArgument, TooLarge
from ingot.steps import image_segmentation
from ingot.steps.after.masks import Masks, best_classes
from ingot.steps.after.pixels import png
from ingot.tensors import DType, TensorSpec

LABELS = tuple(f"label{index}" for index in range(7))
SIZES = np.array([[40, 31], [9, 70], [200, 301]])


def logits(classes: int = 7, height: int = 16, width: int = 13) -> Any:
    return np.random.default_rng(0).standard_normal((3, classes, height, width)).astype(np.float32)


def test_masks_equal_those_of_transformers_processors() -> None:
    from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil

    values = {"logits": logits(), "original_size": SIZES}
    answers = Masks(labels=LABELS).open(lambda name: b"")(values)
    tensors: Any = SimpleNamespace(logits=torch.from_numpy(values["logits"]))
    expected = SegformerImageProcessorPil().post_process_semantic_segmentation(tensors, SIZES.tolist())
    for index, classes in enumerate(expected):
        names = [LABELS[each].encode() for each in np.unique(classes.numpy())]
        count = answers["count"][index]
        assert answers["label"][index, :count].tolist() == names
        for label, file in zip(names, answers["mask"][index], strict=False):
            mask = Pillow.open(BytesIO(file))
            assert (mask.mode, mask.size) == ("L", (SIZES[index, 1], SIZES[index, 0]))
            wanted = (classes.numpy() == LABELS.index(label.decode())) * 255
            assert np.array_equal(np.asarray(mask), wanted)


@pytest.mark.parametrize("size", [(1, 1), (16, 13), (7, 5), (300, 1), (1, 300), (1000, 700)])
def test_bands_do_not_change_the_result(size: tuple[int, int]) -> None:
    values = torch.from_numpy(logits())[:1]
    expected = torch.nn.functional.interpolate(values, size=size, mode="bilinear", align_corners=False)[0].argmax(0)
    assert (best_classes(values[0].numpy(), *size) != expected.numpy()).sum() <= size[0] * size[1] // 100_000


def test_behind_the_count_there_is_nothing() -> None:
    one = np.zeros((2, 7, 4, 4), np.float32)
    one[0, 3] = 1
    one[1, 5, :2] = 1
    answers = Masks(labels=LABELS).open(lambda name: b"")({"logits": one, "original_size": np.array([[8, 8], [8, 8]])})
    assert answers["count"].tolist() == [1, 2]
    assert answers["label"].tolist() == [[b"label3", b""], [b"label0", b"label5"]]
    assert answers["mask"][0, 1] == b""


def test_files_are_compared_by_their_pixels() -> None:
    mask = np.zeros((8, 20), bool)
    mask[:3, 10:] = True
    other = png(mask)
    other = other[:41] + zlib.compress(zlib.decompress(other[41:-16]), 9) + other[-16:]
    assert other != png(mask)
    step = Masks(labels=("sky", "sea"))

    def shares(sky: bytes) -> Any:
        answers = {"label": np.array([[b"sky", b"sea", b""]], object)}
        return step.comparable({**answers, "mask": np.array([[sky, png(~mask), b""]], object)})["mask"]

    found = shares(png(mask))
    assert found.shape == (1, 2, 4, 4)
    assert found[0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 0.5, 0.5], [0] * 4, [0] * 4]
    assert np.array_equal(found[0, 0] + found[0, 1], np.ones((4, 4)))
    assert np.array_equal(shares(other), found)
    assert np.isnan(shares(png(mask)[:-30])[0, 0]).all()


def test_requests_are_bounded() -> None:
    step = Masks(labels=LABELS)
    sizes = np.array([[20_000, 10_000], [20_000, 10_000]])
    with pytest.raises(TooLarge, match="2800000000 pixels times classes, over the limit of 2147483648; divide"):
        step.open(lambda name: b"")({"logits": logits()[:2], "original_size": sizes})


def test_labels_fit_and_pictures_are_bounded() -> None:
    known: dict[str, TensorSpec | None] = {"logits": TensorSpec("logits", DType.FP32, ("batch", 5, 16, 16))}
    with pytest.raises(InvalidArgument, match="step 'masks' has 7 labels, but 'logits' has 5 classes"):
        Masks(labels=LABELS).check(known)
    [image] = image_segmentation([str(index) for index in range(150)]).steps.before
    assert image.limits.pixels == 14316557  # type: ignore[union-attr]
    assert image.size == "original_size"  # type: ignore[union-attr]
