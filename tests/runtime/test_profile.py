"""Timing in turn, with a substitute for both clocks."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import pytest

from ingot.model_store.format.evidence import speedups
from ingot.runtime import Engine
from ingot.runtime.loading import comparison
from ingot.runtime.profiling import profile
from tests.runtime.clocks import EXAMPLE, SIGNATURE, Machine, Model, bursts, race


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr("ingot.runtime.profiling.profile.time", found)
    return found


class TestTiming:
    def test_wall_clock_and_cpu_time_of_each_model(self, machine: Machine) -> None:
        first, second = race(Model(machine, 0.004), Model(machine, 0.002), batches=[1, 8])
        assert [item.rows for item in first] == [1, 8]
        assert [item.seconds for item in second] == pytest.approx([0.002, 0.002])
        assert [item.cpu or 0 for item in second] == pytest.approx([0.002, 0.002])
        assert speedups(first, second) == {1: pytest.approx(2), 8: pytest.approx(2)}
        assert all(item.spread < 1e-6 and not item.disturbed for item in (*first, *second))

    def test_a_busy_machine_is_noticed_and_cpu_time_counts(self, machine: Machine) -> None:
        """Three calls of a slow model, each delayed by other programs: wall-clock ratios say nothing."""
        machine.delay = bursts(0.5)
        first, second = race(Model(machine, 0.2), Model(machine, 0.1), batches=[1], budget=0.1)
        assert second[0].disturbed
        assert speedups(first, second) == {1: pytest.approx(2)}
        assert first[0].seconds / second[0].seconds != pytest.approx(2, rel=0.05)

    def test_models_of_a_gpu_have_no_cpu_time(self, machine: Machine) -> None:
        machine.delay = bursts(0.5)
        (latency,) = race(Model(machine, 0.1, "cuda:0"), batches=[1])[0]
        assert latency.cpu is None
        assert not latency.disturbed

    def test_until_settled(self, machine: Machine) -> None:
        seen: list[float] = []

        def settled(found: Any) -> bool:
            seen.append(machine.wall)
            return len(seen) == 3

        model = Model(machine, 0.01)
        race(model, model, batches=[1, 4], budget=0.1, settled=settled)
        assert len(seen) == 3
        assert [size for size, _ in groupby(model.sizes)] == [1, 4, 1, 4, 1, 4]

    def test_a_limit_of_looks(self, machine: Machine) -> None:
        model = Model(machine, 1)
        race(model, batches=[1], budget=1, settled=lambda found: False)
        assert len(model.sizes) == profile.LOOKS * 4

    def test_more_looks_make_the_ratio_certain(self, machine: Machine) -> None:
        machine.delay = bursts(0.002)
        models = Model(machine, 0.02), Model(machine, 0.01)
        short, long = (
            race(*models, batches=[1], settled=settled)[1][0] for settled in (lambda found: True, profile.steady)
        )
        assert short.disturbed
        assert not long.disturbed
        assert 0 < long.spread <= profile.STEADY

    def test_a_server_on_a_busy_machine_chooses_by_cpu_time(self, machine: Machine) -> None:
        machine.delay = bursts(0.5)
        engines = [cast(Engine, Model(machine, seconds)) for seconds in (0.2, 0.1)]
        first, second = comparison.measured(engines, SIGNATURE, EXAMPLE, 1, 0.1)
        assert comparison.speed(second, first) == pytest.approx(2)
