"""Requests share a batch only where one client's rows cannot change another's answer."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.demo import Data, Digits
from ingot.quant import DynamicInt8, QuantConfig


@pytest.fixture(scope="module")
def dynamic(digits: tuple[Digits, Data, Data], digits_fp32: Path) -> ingot.Archive:
    """An archive whose variant ``int8`` rounds activations in the range of each call, which all its rows determine."""
    config = QuantConfig(recipe=DynamicInt8(), force=True, max_drop=1.0)
    return ingot.quantize(digits_fp32, {"image": digits[1].images}, config=config)


@pytest.mark.matrix
def test_a_variant_with_ranges_per_call_declares_that_requests_cannot_be_batched(dynamic: ingot.Archive) -> None:
    assert not dynamic.variant("int8").serving.batchable
    assert dynamic.variant("fp32").serving.batchable
    assert dynamic.signature.batch == "batch"


def test_a_neighbour_with_huge_values_changes_no_answer(
    dynamic: ingot.Archive, digits: tuple[Digits, Data, Data], tmp_path: Path
) -> None:
    dynamic.save(tmp_path / "dynamic.ingot")
    images = digits[2].images[:64]
    with ingot.serve(f"{tmp_path / 'dynamic.ingot'}#int8", http_port=0, grpc_port=0) as server:
        with ingot.Client(server.http_url) as client:
            alone = [client.infer("digits", {"image": image[None]})["logits"] for image in images]
        stop, disturbed_by = threading.Event(), threading.Semaphore(0)

        def disturb() -> None:
            with ingot.Client(server.http_url) as client:
                while not stop.is_set():
                    client.infer("digits", {"image": images[:1] * 1e6})  # would widen the range of a shared call
                    disturbed_by.release()

        neighbours = [threading.Thread(target=disturb) for _ in range(4)]
        for neighbour in neighbours:
            neighbour.start()
        try:
            with ingot.Client(server.http_url) as client:
                answers = []
                for image in images:
                    assert disturbed_by.acquire(timeout=60)  # the neighbours keep calling between these requests
                    answers.append(client.infer("digits", {"image": image[None]})["logits"])
        finally:
            stop.set()
            for neighbour in neighbours:
                neighbour.join(120)
    for undisturbed, disturbed in zip(alone, answers, strict=True):
        np.testing.assert_array_equal(undisturbed, disturbed)
