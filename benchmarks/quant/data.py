"""Data in three disjoint parts: to train on, to calibrate with, and held out for the judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.quant.wordpiece import Tokenizer
from ingot.tensors import Array

SENTENCES = Path(__file__).with_name("sentences.txt")
TOKENS = 32
"""Length of every tokenized sentence, with its padding."""


@dataclass(frozen=True)
class Part:
    """Inputs by name, with all samples along the first dimension, and their labels where there are any."""

    inputs: dict[str, Array]
    labels: Array | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        return self.inputs if self.labels is None else {**self.inputs, "y": self.labels}


@dataclass(frozen=True)
class Parts:
    train: Part
    calibration: Part
    held_out: Part


def digits(name: str, shape: tuple[int, ...]) -> Parts:
    """Return scikit-learn's 1,797 handwritten digits, enlarged to 32 x 32.

    An image belongs to one part. The held-out ones are shown four times, calibration images twice, each time turned,
    shifted and noisy in another way, so that half a point of accuracy is more than two images.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    first, rest, first_labels, rest_labels = train_test_split(
        images, labels, train_size=900, random_state=0, stratify=labels
    )
    second, third, second_labels, third_labels = train_test_split(
        rest, rest_labels, train_size=400, random_state=0, stratify=rest_labels
    )
    sources = ((first, first_labels, 6), (second, second_labels, 2), (third, third_labels, 4))
    parts = []
    for seed, (source, numbers, times) in enumerate(sources):
        shown = disturb(np.repeat(source, times, 0), np.random.default_rng(seed))
        parts.append(Part({name: shown.reshape(-1, *shape)}, np.repeat(numbers, times).astype(np.int64)))
    return Parts(*parts)


def disturb(images: Array, random: np.random.Generator) -> Array:
    """Return images [N, 8, 8] as [N, 32, 32], each turned up to 20 degrees, scaled, shifted and noisy."""
    rows = len(images)
    turn = random.uniform(-0.35, 0.35, rows)[:, None, None]
    scale = random.uniform(0.8, 1.2, rows)[:, None, None]
    shift = random.uniform(-0.8, 0.8, (2, rows))[:, :, None, None]
    y, x = np.meshgrid(*[(np.arange(32) + 0.5) / 4 - 4] * 2, indexing="ij")
    where_y = (np.cos(turn) * y + np.sin(turn) * x) / scale + 3.5 + shift[0]
    where_x = (np.cos(turn) * x - np.sin(turn) * y) / scale + 3.5 + shift[1]
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    shown = _interpolate(padded, where_y + 2, where_x + 2)
    return (shown + random.normal(0, 0.15, shown.shape)).astype(np.float32)


def _interpolate(images: Array, y: Array, x: Array) -> Array:
    """Return the images' values at fractional places, bilinearly."""
    y, x = np.clip(y, 0, images.shape[1] - 1.001), np.clip(x, 0, images.shape[2] - 1.001)
    top, left = y.astype(int), x.astype(int)
    down, right = y - top, x - left
    row = np.arange(len(images))[:, None, None]
    upper = images[row, top, left] * (1 - right) + images[row, top, left + 1] * right
    lower = images[row, top + 1, left] * (1 - right) + images[row, top + 1, left + 1] * right
    value: Array = upper * (1 - down) + lower * down
    return value


def table() -> Parts:
    """Return rows of a synthetic classification task: 8 classes in clusters, separable by 40 of 128 features."""
    from sklearn.datasets import make_classification

    features, labels = make_classification(
        9000, 128, n_informative=40, n_redundant=20, n_classes=8, n_clusters_per_class=2, class_sep=2.0, random_state=0
    )
    features = features.astype(np.float32)
    # Columns of a real table differ in unit and size.
    features *= np.random.default_rng(0).lognormal(0, 0.7, 128).astype(np.float32)
    cuts = (slice(0, 6000), slice(6000, 7000), slice(7000, 9000))
    return Parts(*(Part({"features": features[cut]}, labels[cut].astype(np.int64)) for cut in cuts))


def texts(vocabulary: Path) -> Parts:
    """Return the tokenized sentences; groups of paraphrases stay together. Nothing is trained on them."""
    lines = SENTENCES.read_text(encoding="utf-8").split("\n", 1)[1]
    groups = [group.split("\n") for group in lines.strip().split("\n\n")]
    known = [sentence for index, group in enumerate(groups) for sentence in group if index % 5 < 2]
    unseen = [sentence for index, group in enumerate(groups) for sentence in group if index % 5 >= 2]
    tokenizer = Tokenizer(vocabulary)

    def part(sentences: list[str]) -> Part:
        ids, mask = tokenizer.encode(sentences, TOKENS)
        return Part({"input_ids": ids, "attention_mask": mask})

    return Parts(part([]), part(known), part(unseen))


def textures() -> Parts:
    """Return coloured random textures [N, 3, 112, 112], with structure at several scales as photographs have it."""
    parts = []
    for seed, rows in enumerate((64, 64, 128)):
        random = np.random.default_rng(seed)
        images = np.zeros((rows, 3, 112, 112), np.float32)
        for cell in (1, 4, 16, 56):
            coarse = random.normal(0, 0.5, (rows, 3, 112 // cell, 112 // cell)).astype(np.float32)
            images += coarse.repeat(cell, 2).repeat(cell, 3)
        parts.append(Part({"image": images}))
    return Parts(*parts)


Load = Callable[[], Parts]
