from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.model_store import BatchLatency, Evidence
from ingot.runtime.loading import warmup
from ingot.runtime.machine import devices
from ingot.tensors import Array
from tests.runtime.fake_engines import DOUBLER, FunctionEngine


def test_each_size_is_timed_as_far_as_the_budget_goes() -> None:
    engine = FunctionEngine()
    latency = warmup.measure(engine, DOUBLER, [], 16, 30.0)
    assert list(latency.known) == [1, 2, 4, 8, 16]
    assert not warmup.measure(engine, DOUBLER, [], 16, 0).known


def test_a_model_that_rejects_made_up_inputs_is_learnt_from_traffic() -> None:
    def refuse(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InvalidArgument("no")

    assert not warmup.measure(FunctionEngine(refuse), DOUBLER, [], 16, 30.0).known


def test_times_recorded_on_this_machine_are_not_measured_again() -> None:
    engine = FunctionEngine(lambda inputs: {"y": np.sort(np.resize(inputs["x"], 300_000))})
    first = warmup.measure(engine, DOUBLER, [], 1, 30.0)(1)
    record = {1: first, 8: 5 * first, 32: 16 * first}
    for _ in range(20):  # another process may disturb a try
        engine.calls.clear()
        latency = warmup.measure(engine, DOUBLER, [], 16, 30.0, record)
        if set(engine.calls) == {1}:
            break
    assert set(engine.calls) == {1}
    assert latency(32) == 16 * first


def test_an_outdated_record_is_timed_again() -> None:
    engine = FunctionEngine()
    latency = warmup.measure(engine, DOUBLER, [], 4, 30.0, {1: 100.0, 8: 200.0})
    assert set(engine.calls) == {1, 2, 4}
    assert latency(4) < 1


def test_a_record_serves_where_nothing_may_be_timed() -> None:
    engine = FunctionEngine()
    assert warmup.measure(engine, DOUBLER, [], 4, 0, {1: 0.5})(1) == 0.5
    assert not engine.calls


@pytest.mark.parametrize(("machine", "sizes"), [(devices.describe(), [1, 8]), ("another", [])])
def test_only_records_of_this_machine_count(machine: str, sizes: list[int]) -> None:
    items = [BatchLatency(rows=samples, seconds=0.1) for samples in (0, 1, 8, (1 << 63) - 1)]
    evidence = Evidence(machine=machine, latency=tuple(items))
    assert list(warmup.recorded(evidence)) == sizes


def test_the_bytes_of_a_row_are_those_of_an_example_or_of_generated_inputs() -> None:
    assert warmup.sample_bytes(DOUBLER, []) == 8
    assert warmup.sample_bytes(DOUBLER, [{"x": np.zeros((5, 2), np.float32)}]) == 8
