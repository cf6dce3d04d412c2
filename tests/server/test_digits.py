"""End to end on real data: the served model answers as PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.demo import Data, Digits, predict
from ingot.tensors import Array


@pytest.fixture(scope="module")
def served(digits_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = ingot.Store(tmp_path_factory.mktemp("store"))
    store.push(ingot.Archive.open(digits_archive), "digits:1")
    with ingot.serve("digits:1", "fp32=digits:1#fp32", store=store, http_port=0, grpc_port=0) as server:
        yield server


def classes(url: str, model: str, images: Array) -> Array:
    with ingot.Client(url) as client:
        parts = [client.infer(model, {"image": part})["logits"] for part in np.array_split(images, 11)]
    found: Array = np.concatenate(parts).argmax(1)
    return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_fp32_predicts_what_pytorch_predicts(
    served: RunningServer, digits: tuple[Digits, Data, Data], protocol: str
) -> None:
    model, _, held_out = digits
    url = served.http_url if protocol == "http" else served.grpc_url
    assert np.array_equal(classes(url, "fp32", held_out.images), predict(model, held_out.images))


def test_int8_is_within_a_point_of_pytorch(served: RunningServer, digits: tuple[Digits, Data, Data]) -> None:
    model, _, held_out = digits
    expected = (predict(model, held_out.images) == held_out.labels).mean()
    actual = (classes(served.http_url, "digits", held_out.images) == held_out.labels).mean()
    assert expected > 0.95
    assert abs(expected - actual) <= 0.01
