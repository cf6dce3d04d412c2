from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from benchmarks.scheduler_sim import contest, models, report
from benchmarks.scheduler_sim.policies import Fixed
from benchmarks.scheduler_sim.profiles import PROFILES, Profile
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Loop, Simulation
from ingot.errors import InvalidArgument
from ingot.runtime import Latency, Limits, Scheduler

# A batch of 32 takes half of the time that requests have, and batches of any size pay.
HURRIED = Profile("hurried", {1: 0.010, 4: 0.012, 8: 0.0135, 16: 0.0165, 32: 0.0235, 64: 0.040}, 0.0475, "made up")
WIDE, GPU = (next(item for item in PROFILES if item.name == name) for name in ("wide", "gpu"))


@pytest.mark.matrix
@pytest.mark.parametrize("profile", [WIDE, GPU])
def test_under_overload_nearly_all_of_the_capacity_is_answers_in_time(profile: Profile) -> None:
    rate = 3 * profile.capacity
    arrivals = traces.poisson(rate, int(rate), profile.slo)
    ours = Simulation(contest.ours(profile), profile.seconds).replay(arrivals)
    assert ours.goodput > 0.95 * profile.capacity
    fixed = Simulation(Fixed(), profile.seconds).replay(arrivals)
    assert fixed.goodput < 0.5 * ours.goodput


@pytest.mark.matrix
@pytest.mark.parametrize("noise", [0.05, 0.15])
@pytest.mark.parametrize("load", [1.2, 1.5, 2.0, 3.0])
def test_batches_stay_large_where_a_full_one_takes_half_of_the_time(load: float, noise: float) -> None:
    most = 32 / HURRIED.seconds[32]
    arrivals = traces.poisson(load * most, 8000, HURRIED.slo)
    ours = Simulation(contest.ours(HURRIED), HURRIED.seconds, noise=noise).replay(arrivals)
    assert ours.goodput > (0.85 if noise < 0.1 else 0.7) * most
    assert ours.batch > (22 if noise < 0.1 else 17)


@pytest.mark.parametrize("slow", [{16: 0.022, 32: 0.045, 64: 0.09}, {8: 0.02, 16: 0.03, 32: 0.05, 64: 0.1}])
@pytest.mark.matrix
def test_times_of_a_busy_machine_do_not_keep_batches_small(slow: dict[int, float]) -> None:
    def goodput(seconds: dict[int, float]) -> float:
        found = []
        for load, noise in itertools.product((0.8, 1.2, 2.0, 3.0), (0.05, 0.15)):
            ours = Scheduler(Limits(), batching=True, latency=Latency(seconds))
            arrivals = traces.poisson(load * HURRIED.capacity, 12000, HURRIED.slo)
            found.append(Simulation(ours, HURRIED.seconds, noise=noise).replay(arrivals).goodput)
        return mean(found)

    assert goodput({**HURRIED.seconds, **slow}) > 0.94 * goodput(dict(HURRIED.seconds))


def test_clients_that_wait_for_their_answers_stay_together() -> None:
    result = Simulation(contest.ours(WIDE), WIDE.seconds).closed(Loop(8, 0.0002, 2000))
    assert result.batch > 7.5
    assert len(result.latencies) == result.offered >= 1990


def test_one_request_alone_never_waits() -> None:
    result = Simulation(contest.ours(WIDE), WIDE.seconds, noise=0).closed(Loop(1, 0.001, 100))
    assert result.percentile(0.99) == pytest.approx(WIDE.seconds[1])


def test_the_backlog_of_a_heavy_model_costs_a_light_one_some_slices_and_no_calls() -> None:
    light, heavy = (next(each for each in PROFILES if each.name == name) for name in ("wide", "cnn"))
    ratios = [models.p99_ratio(light, heavy, load, 1, models.SLICE, count=200) for load in (1.0, 3.0)]
    assert max(ratios) < 4
    assert ratios[1] == pytest.approx(ratios[0], rel=0.2)
    # Calls that keep their core to the end would make it wait for the heavy model's batch of 32, of a second.
    assert models.p99_ratio(light, heavy, 3.0, 1, float("inf"), count=200) > 20


@pytest.mark.matrix
def test_a_report_holds_every_policy_on_every_load(tmp_path: Path) -> None:
    rows = list(contest.contest(WIDE, loads=(1.0,), scale=0.1))
    report.keep(rows, "a test", tmp_path)
    assert len(rows) == 5 * (2 + 3)
    assert "| wide | 1 |" in (tmp_path / "report.md").read_text()
    assert ElementTree.parse(tmp_path / "goodput-wide.svg").getroot().tag.endswith("svg")


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    arrivals = [traces.Arrival(0.0, 1, 0.05), traces.Arrival(0.25, 3)]
    traces.write(path, arrivals)
    assert traces.read(path) == arrivals
    assert {row.policy for row in contest.replay(WIDE, traces.read(path))} == set(contest.POLICIES)
    path.write_text("# a comment\n0.0 one 2\n")
    with pytest.raises(InvalidArgument, match="line 2"):
        traces.read(path)
