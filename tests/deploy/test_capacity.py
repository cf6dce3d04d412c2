"""Plans against queueing theory and against each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ingot.bench.measurement import Objective
from ingot.deploy.capacity import report
from ingot.deploy.capacity.plan import Plan, Request
from ingot.deploy.capacity.server import Server, Traffic
from ingot.deploy.capacity.simulation import Loop, Overhead, Simulation
from ingot.deploy.capacity.traces import Arrival, poisson
from ingot.errors import InvalidArgument
from ingot.runtime import Latency, Limits, Scheduler
from ingot.runtime.scheduling.entry import Entry

OBJECTIVE = Objective(quantile=0.99, seconds=0.05)
# A call takes 4 ms, and 0.3 ms for each sample.
SECONDS = {rows: 0.004 + 0.0003 * rows for rows in (1, 2, 4, 8, 16, 32, 64)}
SERVER = Server(seconds=SECONDS, overhead=Overhead(request=40e-6, call=80e-6))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate fewer requests."""
    monkeypatch.setattr("ingot.deploy.capacity.server._LEAST", 1000)
    monkeypatch.setattr("ingot.deploy.capacity.server._MOST", 3000)


def planned(rate: float, server: Server = SERVER, **changes: float) -> Plan:
    return Plan(Request(rate=rate, objective=OBJECTIVE, **changes), server, Traffic())


def scheduler(seconds: dict[int, float]) -> Scheduler:
    return Scheduler(Limits(), batching=False, latency=Latency(seconds))


@pytest.mark.matrix
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_without_batches_a_replica_is_the_queue_of_theory(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services."""
    arrivals = poisson(load / 0.01, 20_000, math.inf)
    result = Simulation(scheduler({1: 0.01}), {1: 0.01}, noise=0).replay(arrivals)
    mean = sum(result.latencies) / len(result.latencies)
    assert mean == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.08)
    assert result.engine / result.span == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("shared", [True, False])
def test_the_event_loop_takes_its_time_from_the_engine_only_on_shared_cores(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Each request is read in 0.5 ms, the second while the first is computed in 10 ms, and written in 0.5 ms."""
    arrivals = [Arrival(0.0), Arrival(0.008)]
    overhead = Overhead(request=0.001)
    policy, measured = scheduler({1: 0.010}), list[float | None]()
    finish = policy.finish

    def watched(batch: list[Entry], now: float, seconds: float | None = None) -> None:
        measured.append(seconds)
        finish(batch, now, seconds)

    monkeypatch.setattr(policy, "finish", watched)
    result = Simulation(policy, {1: 0.010}, noise=0, overhead=overhead, shared=shared).replay(arrivals)
    assert measured == [pytest.approx(0.0105 if shared else 0.010), pytest.approx(0.010)]
    assert result.loop == pytest.approx(0.002)
    assert result.engine == pytest.approx(0.020)
    first = 0.0005 + (0.0105 if shared else 0.010) + 0.0005
    assert result.latencies == [pytest.approx(first), pytest.approx(first + 0.010 + 0.0005 - 0.008)]


def test_a_short_call_runs_in_the_event_loop() -> None:
    overhead = Overhead(request=60e-6, call=40e-6, wire=10e-6)
    result = Simulation(scheduler({1: 100e-6}), {1: 100e-6}, noise=0, overhead=overhead).replay([Arrival(0.0)])
    assert result.latencies == [pytest.approx(60e-6 + 40e-6 + 100e-6 + 10e-6)]


def test_a_wakeup_costs_the_loop_only_while_a_call_runs_in_a_thread() -> None:
    overhead = Overhead(request=0.001, wakeup=0.002)
    result = Simulation(scheduler({1: 0.010}), {1: 0.010}, noise=0, overhead=overhead).replay(
        [Arrival(0.0), Arrival(0.005), Arrival(0.05)]
    )
    assert result.wakeups == 1
    assert result.loop == pytest.approx(3 * 0.001 + 0.002)


def test_batches_grow_where_the_servers_time_for_a_call_makes_them_pay() -> None:
    """The engine alone is best at 8 samples."""
    seconds = {1: 31e-6, 8: 176e-6, 16: 380e-6, 32: 790e-6, 64: 1600e-6}
    found = []
    for call in (1e-6, 120e-6):
        policy = Scheduler(Limits(), batching=True, latency=Latency(seconds))
        run = Simulation(policy, seconds, overhead=Overhead(request=26e-6, call=call))
        found.append(run.closed(Loop(128, 30e-6, 4000)).batch)
    assert found[0] < 12 < 24 < found[1]


@pytest.mark.matrix
def test_more_requests_need_no_fewer_replicas_and_less_capacity_no_more_requests() -> None:
    plans = [planned(rate) for rate in (100.0, 5000.0, 50_000.0)]
    replicas = [plan.replicas for plan in plans]
    assert replicas == sorted(replicas)
    assert replicas[0] == 1
    assert replicas[-1] >= 50_000 / (0.8 * plans[0].capacity)
    assert all(plan.headroom >= 0.2 - 1e-9 for plan in plans)
    slower = replace(SERVER, overhead=replace(SERVER.overhead, request=400e-6))
    assert planned(100.0, slower).capacity < 0.75 * plans[0].capacity
    assert plans[0].capacity < SERVER.ceiling


@pytest.mark.matrix
def test_headroom_and_the_loss_of_a_replica() -> None:
    tight, roomy = planned(5000.0, headroom=0.0), planned(5000.0, headroom=0.5)
    assert tight.replicas < roomy.replicas
    assert roomy.survives
    assert roomy.lost is not None
    assert roomy.lost.p99 <= OBJECTIVE.seconds
    assert planned(100.0).lost is None
    assert not planned(100.0).survives


@pytest.mark.matrix
def test_cost_is_that_of_all_replicas() -> None:
    plan = planned(5000.0, cost=0.25)
    assert plan.cost == 0.25 * plan.replicas
    assert plan.cost_per_million == pytest.approx(plan.cost / (5000 * 3600) * 1e6)


@pytest.mark.matrix
def test_an_objective_that_no_load_holds_names_the_fastest_possible() -> None:
    with pytest.raises(InvalidArgument, match=r"one request alone takes 4\.9\d ms, which is the fastest possible"):
        Plan(Request(rate=1.0, objective=Objective(quantile=0.99, seconds=0.001)), SERVER, Traffic())
    with pytest.raises(InvalidArgument, match="at the lowest rate that was simulated"):
        Plan(Request(rate=1.0, objective=Objective(quantile=0.99, seconds=0.00496)), SERVER, Traffic())


@pytest.mark.matrix
def test_recorded_arrivals_keep_their_bursts_at_another_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.deploy.capacity.server._MOST", 6000)
    times = [second + 0.0001 * number for second in range(20) for number in range(100)]
    traffic = Traffic(times)
    assert traffic.rate == pytest.approx(100, rel=0.06)
    for rate in (25.0, 100.0, 250.0):
        found = traffic.at(rate, 1.0)
        assert len(found) == pytest.approx(rate * 20, rel=0.15)
        in_bursts = sum(arrival.time % 1 < 0.02 for arrival in found)
        assert in_bursts > 0.95 * len(found)
    assert len(traffic.at(1000.0, 1.0)) == pytest.approx(6000, rel=0.1)  # the most that are simulated here
    # Bursts need more replicas than requests that are independent of each other.
    slow = Server(seconds={1: 0.005}, batching=False)
    request = Request(rate=100.0, objective=Objective(quantile=0.99, seconds=0.1))
    assert Plan(request, slow, traffic).replicas > Plan(request, slow, Traffic()).replicas
    with pytest.raises(InvalidArgument, match="all equal"):
        Traffic([1.0, 1.0])


@pytest.mark.matrix
def test_the_page_shows_the_curve_the_objective_and_the_plan() -> None:
    plan = planned(5000.0, cost=0.5)
    parts = {"profile": "made up", "overhead": "made up", "sample": "x [8]", "command": "ingot"}
    source = report.Source(model="a<b#int8", notes=["a note"], **parts)
    page = report.html(plan, source)
    assert "a<b" not in page
    assert "objective: p99" in page
    assert "planned, p99" in page
    assert "a note" in page
    assert page.count("<polyline") == 2 * 3  # for broad and for narrow screens
    rates = [load.rate for load in plan.curve]
    assert rates == sorted(rates)
    assert plan.curve[-1].p99 <= OBJECTIVE.seconds
    terms = dict(report.summary(plan))
    assert terms["replicas"].startswith(str(plan.replicas))
    assert "per million requests" in terms["cost"]
