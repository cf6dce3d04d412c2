from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot import QuantConfig
from ingot.errors import InvalidArgument
from ingot.model_store import BatchLatency
from ingot.quant import DynamicInt8, StaticInt8, WeightInt4, WeightInt8
from ingot.quant.graph.source import Source
from ingot.quant.measure.limits import Deadline
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.measure.trial import FASTER, Trial
from ingot.quant.metric import Comparison, Score
from ingot.quant.schemes.plan import Plan
from ingot.quant.search import sensitivity
from ingot.quant.search.families import families, refinements
from ingot.quant.search.journal import Journal
from ingot.quant.search.search import Found, Search, fewest
from ingot.quant.search.sensitivity import Noise
from ingot.runtime.profiling import profile
from tests.quant import graphs
from tests.quant.graphs import random
from tests.quant.networks import NETWORKS
from tests.runtime.clocks import Machine, Model, bursts, race

LAYERS = 8
CONFIG = QuantConfig(max_drop=0.01, engines=("onnxruntime",))
Worth = Callable[[Plan], tuple[float, float]]
"""How many times as fast a plan's model is, and how much it loses."""


@pytest.fixture(scope="module")
def source() -> Source:
    """Eight products; their layers are called MatMul_p0 to MatMul_p7."""
    nodes, value = [], "x"
    for index in range(LAYERS):
        nodes.append(f"p{index} = MatMul({value}, w) t{index} = Tanh(p{index})")
        value = f"t{index}"
    text = f"(float[batch,4] x) => (float[batch,4] y) {{ {' '.join(nodes)} y = Identity({value}) }}"
    return graphs.source_of(graphs.graph(text, {"w": random(4, 4)}))


def trial(plan: Plan, speed: float, drop: float) -> Trial:
    if math.isnan(drop):
        return Trial(plan=plan, failure="it cannot be loaded")
    # No two plans have the same size, as a search treats models of equal size as the same.
    return Trial(
        plan=plan,
        size=int(plan.key[:12], 16),
        latency=(BatchLatency(rows=1, seconds=1 / speed),),
        baseline=(BatchLatency(rows=1, seconds=1),),
        comparison=Comparison(Score(1, 1, 1), Score(1 - drop, 0, 1), Score(drop, drop, drop)),
    )


NAMES = {
    "static-int8": "static int8",
    "dynamic-int8": "dynamic int8",
    "weight-int8": "int8 weights",
    "weight-int4": "int4 weights",
}


class FakeRunner:
    """A runner whose plans have given scores and speeds."""

    def __init__(self, source: Source, worth: Worth, *, data: bool = True, retimed: Worth | None = None):
        self.source = source
        self.calibration = object() if data else None
        self.evaluation = object()
        self.seen: Mapping[str, Any] = MappingProxyType({})
        self.large = False
        self.batches = (1, 8, 32)
        self.check: Callable[[], None] = lambda: None
        self.cost = 1.0
        self.attempts: list[Plan] = []
        self.clock = 0.0
        self.timed: list[str] = []
        self._worth = worth
        self._retimed = retimed or worth

    def attempt(self, plan: Plan) -> Trial:
        self.attempts.append(plan)
        for _ in range(4):  # an attempt may be abandoned at each of its steps
            self.clock += self.cost / 4
            self.check()
        return trial(plan, *self._worth(plan))

    def time_again(
        self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]
    ) -> list[Trial]:
        self.timed += [item.plan.name for item in trials]
        self.clock += len(trials) * self.cost / 2 + timing * (len(trials) + 1) * len(self.batches)
        return [trial(item.plan, self._retimed(item.plan)[0], item.drop) for item in trials]


def run(runner: FakeRunner, config: QuantConfig = CONFIG, journal: Journal | None = None) -> Found:
    journal = journal or Journal(None, {})
    return Search(cast(TrialRunner, runner), config, journal, lambda step: None).run()


@pytest.fixture
def rankings(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Requested rankings; layers with higher numbers rank as more harmful."""
    asked: list[Plan] = []

    def rank(source: Source, plan: Plan, *arguments: Any, **options: Any) -> list[Noise]:
        asked.append(plan)
        return [Noise(name, 20.0, 1.0) for name in sorted(plan.schemes, reverse=True)]

    monkeypatch.setattr(sensitivity, "rank", rank)
    return asked


def static(plan: Plan) -> bool:
    return plan.needs_data and plan.between and plan.method == "minmax" and not plan.correct and not plan.migrate


class TestChoice:
    def test_the_fastest_that_holds(self, source: Source) -> None:
        worth = {"static int8": (3.0, 0.005), "dynamic int8": (2.0, 0.001), "int8 weights": (1.5, 0)}
        found = run(FakeRunner(source, lambda plan: worth.get(plan.name, (1.0, 0.02))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "static int8"
        assert found.complete

    def test_a_faster_one_that_breaks_the_budget_is_never_chosen(self, source: Source, rankings: list[Plan]) -> None:
        worth = {"static int8": (9.0, 0.0101), "dynamic int8": (2.0, 0.01)}
        found = run(FakeRunner(source, lambda plan: worth.get(plan.name, (1.0, 0.5))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "dynamic int8"

    def test_of_those_that_are_as_fast_the_most_exact(self, source: Source) -> None:
        worth = {"static int8": (2.0, 0.009), "dynamic int8": (1.5, 0), "int8 weights": (1.99, 0.001)}
        found = run(FakeRunner(source, lambda plan: worth.get(plan.name, (1.0, 0.5))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "int8 weights"

    def test_nothing_that_is_not_faster(self, source: Source) -> None:
        found = run(FakeRunner(source, lambda plan: (1.01, 0)))
        assert found.chosen is None
        assert len(found.trials) >= 4

    def test_nothing_that_was_faster_by_chance(self, source: Source) -> None:
        found = run(FakeRunner(source, lambda plan: (1.5, 0), retimed=lambda plan: (1.0, 0)))
        assert found.chosen is None

    def test_a_faster_candidate_that_was_not_chosen_is_explained(self, source: Source) -> None:
        worth = {"static int8": (2.0, 0), "dynamic int8": (2.2, 0.005), "int8 weights": (2.03, 0.009)}
        found = run(FakeRunner(source, lambda plan: worth.get(plan.name, (1.0, 0.5))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "static int8"
        names = {trial.plan.key: trial.plan.name for trial in found.trials}
        assert {names[key]: remark for key, remark in found.remarks.items()} == {
            "dynamic int8": "counts as 1.83x: its requests are not batched",
            "int8 weights": "within 3% of the chosen one, less exact",
        }

    def test_a_plan_that_was_fast_only_in_the_first_timing(self, source: Source) -> None:
        """The first timing may be too fast, also of plans that are timed again."""
        runner = FakeRunner(source, lambda plan: (3 - len(runner.attempts) / 100, 0), retimed=lambda plan: (1.5, 0))
        found = run(runner)
        assert "timed once, not among the best 4" in found.remarks.values()

    def test_the_last_timing_counts(self, source: Source) -> None:
        first = {"static int8": (3.0, 0), "dynamic int8": (2.9, 0)}
        second = {"static int8": (2.0, 0), "dynamic int8": (2.8, 0)}
        runner = FakeRunner(source, lambda plan: first.get(plan.name, (1, 0)), retimed=lambda plan: second[plan.name])
        found = run(runner)
        assert found.chosen is not None
        assert found.chosen.plan.name == "dynamic int8"
        assert found.chosen.speed == pytest.approx(2.8)

    def test_of_a_large_model_the_best_alone_is_timed_once_more(self, source: Source) -> None:
        """All models that are timed side by side would have to fit into memory."""
        worth = {"static int8": (3.0, 0), "dynamic int8": (2.9, 0), "int8 weights": (2.8, 0)}
        runner = FakeRunner(source, lambda plan: worth.get(plan.name, (1, 0)))
        run(runner)
        assert len(runner.timed) > 1
        runner = FakeRunner(source, lambda plan: worth.get(plan.name, (1, 0)))
        runner.large = True
        assert run(runner).chosen is not None
        assert runner.timed == ["static int8"]

    @pytest.mark.parametrize(("speed", "name"), [(2.3, "static int8"), (2.5, "dynamic int8")])
    def test_a_plan_whose_rows_touch_must_be_much_faster(self, source: Source, speed: float, name: str) -> None:
        worth = {"static int8": (2.0, 0), "dynamic int8": (speed, 0)}
        found = run(FakeRunner(source, lambda plan: worth.get(plan.name, (1, 0))))
        assert found.chosen is not None
        assert found.chosen.plan.name == name

    @pytest.mark.parametrize(("gain", "name"), [(1.0, "dynamic int8"), (1.5, "static int8")])
    def test_but_only_as_much_as_batching_gains(self, source: Source, gain: float, name: str) -> None:
        """A call of 32 rows takes 32 times as long as one, or less."""

        class Runner(FakeRunner):
            def attempt(self, plan: Plan) -> Trial:
                found = super().attempt(plan)
                more = [replace_rows(item, 32, 32 / gain) for item in (found.latency[0], found.baseline[0])]
                return replace(found, latency=(*found.latency, more[0]), baseline=(*found.baseline, more[1]))

            def time_again(self, trials: Sequence[Trial], *_: object) -> list[Trial]:
                return list(trials)

        worth = {"static int8": (1.1, 0), "dynamic int8": (1.2, 0)}
        found = run(Runner(source, lambda plan: worth.get(plan.name, (0.5, 0))))
        assert found.chosen is not None
        assert found.chosen.plan.name == name

    def test_failures_are_noted_and_never_chosen(self, source: Source) -> None:
        found = run(FakeRunner(source, lambda plan: (5, math.nan) if plan.needs_data else (1.5, 0)))
        assert found.chosen is not None
        assert not found.chosen.plan.needs_data
        assert any(item.failure for item in found.trials)

    @pytest.mark.matrix
    @given(st.integers(0, 10_000), st.floats(0, 0.1))
    def test_whatever_plans_are_worth(self, source: Source, seed: int, budget: float) -> None:
        def worth(plan: Plan) -> tuple[float, float]:
            number = (int(plan.key, 16) * 2654435761 + seed * 40503) % 2**32 / 2**32
            other = (int(plan.key, 16) * 40503 + seed * 2654435761) % 2**32 / 2**32
            return 0.5 + 2 * number, math.nan if other > 0.97 else 0.1 * other

        def rank(source: Source, plan: Plan, *arguments: Any, **options: Any) -> list[Noise]:
            return [Noise(name, 20.0, 1.0) for name in plan.schemes]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sensitivity, "rank", rank)
            runner = FakeRunner(source, worth)
            found = run(runner, replace(CONFIG, max_drop=budget))
        good = [item for item in found.trials if item.holds(budget) and item.speed >= FASTER]
        assert (found.chosen is None) == (not good)
        if found.chosen is not None:
            assert found.chosen in good
            # Plans whose rows affect each other count for less, as a server cannot batch their requests.
            worth_of = {item.plan.key: item.speed / (1.2 if item.plan.rows_touch else 1) for item in good}
            assert worth_of[found.chosen.plan.key] * 1.03 >= max(worth_of.values())
        assert len(runner.attempts) == len({plan.key for plan in runner.attempts}) == len(found.trials)


class BusyRunner(FakeRunner):
    """A runner on a machine whose other programs delay calls by half of their time on average, and often by more."""

    def __init__(self, source: Source, worth: Worth, machine: Machine, seed: int):
        super().__init__(source, worth)
        self._machine = machine
        self._random = np.random.default_rng(seed)

    def attempt(self, plan: Plan) -> Trial:
        made = super().attempt(plan)
        return made if made.failure else self._timed([made], 0.15, lambda found: not found[0].unclear)[0]

    def time_again(
        self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]
    ) -> list[Trial]:
        return self._timed(trials, timing, settled)

    def _timed(self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]) -> list[Trial]:
        delays = [bursts(0.01, int(self._random.integers(1 << 30))), lambda: float(self._random.exponential(5e-4))]
        self._machine.delay, self._machine.jitter = delays
        models = [Model(self._machine, 0.02)]
        models += [Model(self._machine, 0.02 / self._worth(item.plan)[0]) for item in trials]

        def made(found: Sequence[profile.Latencies]) -> list[Trial]:
            return [replace(item, baseline=found[0], latency=found[at]) for at, item in enumerate(trials, 1)]

        return made(race(*models, batches=[1, 8], budget=timing, settled=lambda found: settled(made(found))))


class TestNoise:
    @pytest.mark.matrix
    def test_a_busy_machine_does_not_change_the_choice(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        worth = {"static int8, layers alone": (1.6, 0.001), "static int8": (1.45, 0), "dynamic int8": (1.5, 0.002)}
        machine = Machine()
        monkeypatch.setattr("ingot.runtime.profiling.profile.time", machine)
        for seed in range(6):
            found = run(BusyRunner(source, lambda plan: worth.get(plan.name, (0.9, 0)), machine, seed)).chosen
            assert found is not None
            assert found.plan.name == "static int8, layers alone"
            assert found.speedups == {rows: pytest.approx(1.6, rel=0.06) for rows in (1, 8)}

    @pytest.mark.parametrize(("first", "chosen"), [(0.95, "static int8"), (0.8, None)])
    def test_nothing_is_refused_by_one_short_timing(self, source: Source, first: float, chosen: str | None) -> None:
        runner = FakeRunner(source, lambda plan: (first, 0), retimed=lambda plan: (2.0 if static(plan) else 0.9, 0))
        found = run(runner)
        assert (found.chosen.plan.name if found.chosen else None) == chosen
        assert bool(runner.timed) is bool(chosen)

    def test_the_best_that_is_slower_at_a_batch_size_is_timed_again(self, source: Source) -> None:
        """As bf16 was on a network of bytes: 0.8 times as fast at batch 1 by one timing, and the fastest in fact."""

        class Runner(FakeRunner):
            def attempt(self, plan: Plan) -> Trial:
                return self._with_batch_1(super().attempt(plan), 0.8)

            def time_again(
                self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]
            ) -> list[Trial]:
                return [self._with_batch_1(item, 1.1) for item in super().time_again(trials, timing, settled)]

            @staticmethod
            def _with_batch_1(trial: Trial, speed: float) -> Trial:
                if not static(trial.plan):
                    return trial
                more = [replace_rows(item, 32) for item in (trial.latency[0], trial.baseline[0])]
                first = BatchLatency(rows=1, seconds=1 / speed), BatchLatency(rows=1, seconds=1)
                return replace(trial, latency=(first[0], more[0]), baseline=(first[1], more[1]))

        worth = {"static int8": (4.0, 0), "dynamic int8": (1.5, 0)}
        found = run(Runner(source, lambda plan: worth.get(plan.name, (1, 0))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "static int8"
        assert found.chosen.speedups == {1: pytest.approx(1.1), 32: pytest.approx(4)}

    def test_what_the_timing_cannot_distinguish_is_said(self, source: Source) -> None:
        """The most exact is chosen."""

        class Runner(FakeRunner):
            def time_again(
                self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]
            ) -> list[Trial]:
                timed = [
                    replace(item, latency=(item.latency[0].model_copy(update={"spread": 0.1}),)) for item in trials
                ]
                assert not settled(timed)
                return timed

        worth = {"static int8": (2.0, 0.005), "static int8, layers alone": (1.8, 0.001), "int8 weights": (1.4, 0)}
        found = run(Runner(source, lambda plan: worth.get(plan.name, (0.5, 0.5))))
        assert found.chosen is not None
        assert found.chosen.plan.name == "static int8, layers alone"
        assert found.notes == (
            "the timing cannot say which of 'static int8', 'static int8, layers alone' is the fastest: the most exact "
            "of them was chosen",
        )


def replace_rows(item: BatchLatency, rows: int, longer: float = 1) -> BatchLatency:
    return item.model_copy(update={"rows": rows, "seconds": item.seconds * longer})


class TestMending:
    def test_other_ranges_before_any_layer_is_kept(self, source: Source, rankings: list[Plan]) -> None:
        def worth(plan: Plan) -> tuple[float, float]:
            plain = plan.method == "minmax" and not plan.correct and not plan.migrate
            return 3 if plan.needs_data else 1.5, 0.5 if plan.needs_data and plain else 0.001

        found = run(FakeRunner(source, worth))
        assert found.chosen is not None
        assert found.chosen.plan.name.startswith("static int8")
        assert ", least squares" in found.chosen.plan.name
        assert not rankings

    @pytest.mark.parametrize("bad", range(LAYERS + 1))
    def test_as_few_layers_as_possible_are_kept(self, source: Source, rankings: list[Plan], bad: int) -> None:
        """Each layer kept in float costs some speed; the ``bad`` layers with the highest numbers break the budget."""
        spoiling = {f"MatMul_p{LAYERS - 1 - index}" for index in range(bad)}

        def worth(plan: Plan) -> tuple[float, float]:
            quantized = [name for name, kind in plan.schemes.items() if kind == "static"]
            return 1 + len(quantized) / LAYERS, 0.02 * len(spoiling & set(quantized))

        found = run(FakeRunner(source, worth))
        if bad == LAYERS:
            assert found.chosen is None
            return
        assert found.chosen is not None
        kept = {name for name in source.names if found.chosen.plan.schemes.get(name) != "static"}
        assert kept == spoiling
        assert len(rankings) <= 2  # one per family: with and without operators between layers
        if bad:
            assert {noise.layer for noise in found.noises} == set(source.names)

    def test_each_plan_has_a_separate_ranking(self, source: Source, rankings: list[Plan]) -> None:
        """Layers that static ranges spoil are not those that 4-bit weights spoil."""

        def worth(plan: Plan) -> tuple[float, float]:
            kinds = set(plan.schemes.values())
            if kinds == {"static"}:
                return 4, 1
            return (2, 0.004 * len(plan.schemes)) if kinds == {"int4"} else (1, 0)

        found = run(FakeRunner(source, worth))
        assert [plan.precision for plan in rankings][-1] == "int4"
        assert rankings[0].needs_data
        assert found.chosen is not None
        assert len(found.chosen.plan.schemes) == 2
        assert found.noises

    def test_a_plan_too_slow_to_win_is_not_repaired(self, source: Source, rankings: list[Plan]) -> None:
        worth = {"dynamic int8": (3.0, 0.0)}
        runner = FakeRunner(source, lambda plan: worth.get(plan.name, (2.0, 0.5)))
        found = run(runner)
        assert not rankings
        assert not any("least squares" in plan.name for plan in runner.attempts)
        assert found.chosen is not None

    def test_keeping_stops_where_floats_cost_all_that_was_won(self, source: Source, rankings: list[Plan]) -> None:
        """All layers spoil the plan; two kept ones make it slower than the best."""

        def worth(plan: Plan) -> tuple[float, float]:
            if plan.name.startswith("dynamic int8"):
                return 2.0, 0.0
            return (3.0 - 0.6 * (LAYERS - len(plan.schemes)), 0.02 * len(plan.schemes)) if static(plan) else (1, 1)

        runner = FakeRunner(source, worth)
        found = run(runner)
        assert found.chosen is not None
        assert found.chosen.plan.name.startswith("dynamic int8")
        assert len([plan for plan in runner.attempts if "kept" in plan.name]) <= 4


class TestLimits:
    @pytest.fixture
    def runner(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
        """A runner whose clock is the search's."""
        runner = FakeRunner(source, lambda plan: (2.0, 0) if plan.name == "static int8" else (1.5, 0))
        monkeypatch.setattr(Deadline, "now", property(lambda self: runner.clock))
        return runner

    def test_time_that_is_up_leaves_the_best_so_far(self, runner: FakeRunner) -> None:
        found = run(runner, replace(CONFIG, budget=4.5))
        assert not found.complete
        assert len(runner.attempts) == 2
        assert found.chosen is not None
        assert found.chosen.plan.name == "static int8"

    @pytest.mark.parametrize("cost", [0.3, 2.0, 5.0, 9.0])
    @pytest.mark.parametrize("budget", [20.0, 45.0, 80.0])
    def test_the_time_is_kept_to_within_a_tenth(self, runner: FakeRunner, budget: float, cost: float) -> None:
        """Including the attempts, the last timing, and writing the result, which costs less than an attempt."""
        runner.cost = cost
        found = run(runner, replace(CONFIG, budget=budget))
        assert runner.clock + cost / 2 <= 1.1 * budget
        assert found.chosen is not None or cost == 9

    def test_an_attempt_that_lasts_is_given_up(self, runner: FakeRunner) -> None:
        runner.cost = 1000.0
        found = run(runner, replace(CONFIG, budget=900.0))
        assert runner.clock == 1000
        assert (found.chosen, found.trials, found.complete) == (None, (), False)

    def test_time_that_is_up_at_once_leaves_nothing(self, runner: FakeRunner) -> None:
        deadline = Deadline(0.5)
        runner.clock = 1
        search = Search(cast(TrialRunner, runner), CONFIG, Journal(None, {}), lambda step: None, deadline=deadline)
        found = search.run()
        assert (found.chosen, found.trials, found.complete) == (None, (), False)

    def test_layers_to_keep_are_in_no_plan(self, source: Source, rankings: list[Plan]) -> None:
        runner = FakeRunner(source, lambda plan: (2.0, 0.02))
        run(runner, replace(CONFIG, keep=("MatMul_p3", "MatMul_p4")))
        assert len(runner.attempts) > 6
        assert all(not {"MatMul_p3", "MatMul_p4"} & set(plan.schemes) for plan in runner.attempts)

    def test_a_layer_to_keep_that_there_is_not(self, source: Source) -> None:
        with pytest.raises(InvalidArgument, match="there is no layer 'MatMul_p9' to keep; the nearest are: MatMul_p"):
            run(FakeRunner(source, lambda plan: (2.0, 0)), replace(CONFIG, keep=("MatMul_p9",)))

    def test_without_data_no_ranges_are_learnt(self, source: Source) -> None:
        runner = FakeRunner(source, lambda plan: (2.0, 0), data=False)
        found = run(runner)
        assert found.chosen is not None
        assert not any(plan.needs_data for plan in runner.attempts)


class TestJournal:
    def test_nothing_is_tried_again_but_the_best(
        self, source: Source, rankings: list[Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def worth(plan: Plan) -> tuple[float, float]:
            return 1 + len(plan.schemes) / LAYERS, 0.004 * len(plan.schemes)

        path, head = tmp_path / "search", {"journal": 1}
        first = FakeRunner(source, worth)
        before = run(first, journal=Journal(path, head))
        second = FakeRunner(source, worth)
        after = run(second, journal=Journal(path, head))
        assert len(first.attempts) > 4
        assert after.chosen == before.chosen
        assert after.chosen is not None
        assert after.chosen.plan in second.attempts
        assert len(second.attempts) <= 4
        assert after.trials == before.trials
        assert not caplog.records

    def test_its_record_of_the_best_is_verified(
        self, source: Source, rankings: list[Plan], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """By the journal the plans with static ranges lose nothing; in fact they lose everything, or cannot be made."""
        path, head = tmp_path / "search", {"journal": 1}

        def forged(plan: Plan) -> tuple[float, float]:
            return (3, 0) if plan.needs_data else (1.5, 0.001)

        def true(plan: Plan) -> tuple[float, float]:
            return (3, 0.5 if plan.between else math.nan) if plan.needs_data else (1.5, 0.001)

        believed = run(FakeRunner(source, forged), journal=Journal(path, head)).chosen
        assert believed is not None
        assert believed.plan.needs_data
        for _ in range(2):
            found = run(FakeRunner(source, true), journal=Journal(path, head))
            assert found.chosen is not None
            assert not found.chosen.plan.needs_data
            assert found.chosen.drop == 0.001
            assert not any(item.holds(0.01) for item in found.trials if item.plan.needs_data and not item.failure)
        assert "'static int8' loses 0.5, but 0 according to the journal" in caplog.text
        assert "'static int8, layers alone' failed, though the journal says otherwise" in caplog.text

    def test_a_search_that_was_interrupted_resumes(self, source: Source, rankings: list[Plan], tmp_path: Path) -> None:
        def worth(plan: Plan) -> tuple[float, float]:
            return 1 + len(plan.schemes) / LAYERS, 0.004 * len(plan.schemes)

        path, head = tmp_path / "search", {"journal": 1}
        whole = FakeRunner(source, worth)
        expected = run(whole)

        class Interrupted(FakeRunner):
            def attempt(self, plan: Plan) -> Trial:
                if len(self.attempts) == 3:
                    raise KeyboardInterrupt
                return super().attempt(plan)

        with pytest.raises(KeyboardInterrupt):
            run(Interrupted(source, worth), journal=Journal(path, head))
        rest = FakeRunner(source, worth)
        found = run(rest, journal=Journal(path, head))
        again = [plan for plan in rest.attempts if plan in whole.attempts[:3]]
        assert len(rest.attempts) == len(whole.attempts) - 3 + len(again)
        assert found == expected


class TestPlans:
    def test_families(self, source: Source) -> None:
        for has_data in (True, False):
            plans = list(families(source, has_data))
            assert len({plan.key for plan in plans}) == len({plan.name for plan in plans}) == len(plans)
            assert any(plan.needs_data for plan in plans) is has_data
            assert all(plan.schemes for plan in plans)

    def test_a_recipe_and_the_plan_of_its_name_are_one_model(self) -> None:
        """``static int8`` of the search had embeddings in 8 bits, and ``static-int8`` had not."""
        nodes = "e = Gather(t, id) h = MatMul(e, w) r = Relu(h) y = MatMul(r, v)"
        text = f"(int64[batch] id) => (float[batch,4] y) {{ {nodes} }}"
        table = graphs.source_of(graphs.graph(text, {"t": random(8192, 8), "w": random(8, 8), "v": random(8, 4)}))
        nodes = ", h = LSTM<hidden_size=4>(x, w, r) s = Squeeze(h) z = MatMul(s, v)"
        text = f"(float[n,batch,6] x) => (float[batch,4] z) {{ {nodes} }}"
        lstm = graphs.source_of(graphs.graph(text, {"w": random(1, 16, 6), "r": random(1, 16, 4), "v": random(4, 4)}))
        for model in (table, lstm, graphs.source_of(NETWORKS["conv"].model())):
            plans = {plan.name: plan for plan in families(model, True, ("onnxruntime", "openvino"))}
            for recipe in (StaticInt8(), DynamicInt8(), WeightInt8(), WeightInt4()):
                plan = recipe.plan(model)
                name = NAMES[recipe.name]
                assert (plan.key if plan.schemes else None) == (plans[name].key if name in plans else None), name
        assert plans

    def test_embeddings_may_stay_in_floats(self) -> None:
        text = "(int64[batch] id) => (float[batch,4] y) { e = Gather(t, id) y = MatMul(e, w) }"
        source = graphs.source_of(graphs.graph(text, {"t": random(8192, 8), "w": random(8, 4)}))
        found = {plan.name: plan for plan in families(source, True, ("onnxruntime", "openvino"))}
        for name in ("static int8, float embeddings", "static int8, float embeddings, OpenVINO"):
            assert set(found[name].schemes.values()) == {"static"}
        assert len({plan.key for plan in found.values()}) == len(found)

        def worth(plan: Plan) -> tuple[float, float]:
            layers_alone = plan.needs_data and not plan.between
            return (1.5 if "int8" in plan.schemes.values() else 1.8, 0) if layers_alone else (1.0, 0)

        chosen = run(FakeRunner(source, worth)).chosen
        assert chosen is not None
        assert chosen.plan.name == "static int8, layers alone, float embeddings"

    def test_refinements_are_other_plans_for_the_same_layers(self, source: Source) -> None:
        plan = next(plan for plan in families(source, True) if plan.needs_data)
        found = list(refinements(plan))
        assert len({plan.key, *(item.key for item in found)}) == len(found) + 1
        assert all(item.schemes == plan.schemes for item in found)
        assert list(refinements(Plan("dynamic int8", {"a": "dynamic"}))) == []


class TestFewest:
    @pytest.mark.matrix
    @given(st.integers(1, 300), st.integers(1, 400))
    def test_it_is_the_least_that_is_enough_in_few_tries(self, most: int, needed: int) -> None:
        tried: list[int] = []

        def enough(count: int) -> bool:
            assert 1 <= count <= most
            tried.append(count)
            return count >= needed

        assert fewest(most, enough) == (needed if needed <= most else None)
        assert len(tried) <= 2 * math.log2(most) + 2

    @pytest.mark.matrix
    @given(st.lists(st.booleans(), min_size=1, max_size=40))
    def test_its_result_suffices_although_more_layers_may_not(self, answers: list[bool]) -> None:
        found = fewest(len(answers), lambda count: answers[count - 1])
        assert found is None or answers[found - 1]
