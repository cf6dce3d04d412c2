"""The load of a server, as ``ingot server top`` computes it from metrics and statistics."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.client.monitoring import Reading, Samples, load, quantile

LABELS = 'model="digits",version="1"'


def histogram(*counts: int, name: str = "ingot_request_seconds", labels: str = LABELS, total: float = 0.0) -> str:
    """Return a histogram with the bounds 0.1, 0.2 and infinity, from the counts of each bucket."""
    lines, below = [f"# TYPE {name} histogram"], 0
    for bound, count in zip(("0.1", "0.2", "+Inf"), counts, strict=True):
        below += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {below}')
    return "\n".join([*lines, f"{name}_count{{{labels}}} {below}", f"{name}_sum{{{labels}}} {total}", ""])


def model(count: int = 0, **milliseconds: int) -> dict[str, Any]:
    stats = {label: {"count": count, "ns": spent * 1_000_000} for label, spent in milliseconds.items()}
    return {"name": "digits", "version": "1", "inference_stats": stats, "ingot": {"state": "ready", "device": "cpu"}}


def reading(at: float, text: str, found: dict[str, Any]) -> Reading:
    return Reading(at=at, samples=Samples(text), models=[found])


@pytest.mark.parametrize(
    ("before", "now", "share", "expected"),
    [
        ((0, 0, 0), (10, 0, 0), 0.5, 0.05),
        ((5, 0, 0), (10, 10, 0), 0.5, 0.125),  # 5 and 10: the middle is a quarter into the second bucket
        ((0, 0, 0), (1, 1, 8), 0.99, 0.2),  # beyond the last bound
        ((3, 2, 1), (3, 2, 1), 0.5, None),
        ((9, 9, 9), (1, 0, 0), 0.5, None),  # another process, which counts from 0
    ],
)
def test_a_quantile_is_that_of_what_was_counted_between_two_readings(
    before: tuple[int, ...], now: tuple[int, ...], share: float, expected: float | None
) -> None:
    found = quantile(
        Samples(histogram(*now)), Samples(histogram(*before)), "ingot_request_seconds", share, model="digits"
    )
    assert found == (None if expected is None else pytest.approx(expected))


def test_rates_are_of_the_last_interval_and_shares_of_the_window() -> None:
    def text(requests: int, failed: int, encoding: float) -> str:
        lines = [
            f'ingot_requests_total{{{LABELS},protocol="http",code="ok"}} {requests}',
            f'ingot_requests_total{{{LABELS},protocol="http",code="unavailable"}} {failed}',
            f'ingot_errors_total{{protocol="http",code="unavailable"}} {failed}',
            f"ingot_queued_requests{{{LABELS}}} 3",
            f"ingot_in_flight_requests{{{LABELS}}} 4",
            "ingot_http_connections 5",
            "ingot_grpc_connections 2",
            "ingot_start_time_seconds 7",
            histogram(requests // 2, 0, 0, name="ingot_batch_size", total=requests),
            histogram(requests, 0, 0, name="ingot_encode_seconds", labels='protocol="http"', total=encoding),
        ]
        return "\n".join(lines)

    first = reading(0, text(0, 0, 0.0), model())
    before = reading(8, text(100, 2, 0.1), model(100, queue=1, compute_input=1, compute_infer=1, compute_output=1))
    stats = model(200, queue=400, compute_input=200, compute_infer=800, compute_output=200)
    found = load(reading(10, text(200, 6, 0.4), stats), before, first)
    assert (found.started, found.connections, found.in_flight) == (7, 7, 4)
    assert found.errors_per_s == 2
    [row] = found.models
    assert (row.requests_per_s, row.failed_per_s, row.rows_per_s, row.mean_batch) == (52, 2, 50, 2)
    assert (row.queue, row.state, row.device, row.variant) == (3, "ready", "cpu", "")
    # A request took 2 ms in the queue, 1 in batching, 4 in the engine, 1 for splitting and 2 for encoding.
    assert row.shares == pytest.approx({"queue": 0.2, "batch": 0.1, "compute": 0.4, "encode": 0.3})
    [error] = found.errors
    assert (error.protocol, error.code, error.count, error.recent) == ("http", "unavailable", 6, 6)


def test_gpus_show_what_is_known_of_them() -> None:
    text = """
ingot_gpu_memory_bytes{gpu="0",kind="total"} 100
ingot_gpu_memory_bytes{gpu="0",kind="used"} 60
ingot_gpu_utilization_ratio{gpu="0"} 0.5
ingot_gpu_memory_bytes{gpu="10",kind="server"} 1
"""
    now = reading(1, text, model())
    assert [(gpu.gpu, gpu.used, gpu.total, gpu.utilization) for gpu in load(now, now, now).gpus] == [
        ("0", 60, 100, 0.5),
        ("10", None, None, None),
    ]


def test_a_candidate_shows_while_it_is_tried() -> None:
    names = f"{{{LABELS}}}"
    text = f"""
ingot_canary_weight_percent{names} 20
ingot_canary_worst_error{names} 0.5
ingot_canary_latency_ratio{names} NaN
ingot_canary_comparisons_total{{{LABELS},result="agreed"}} 8
ingot_canary_comparisons_total{{{LABELS},result="differed"}} 1
"""
    now = reading(1, text, model())
    [canary] = load(now, now, now).canaries
    assert (canary.name, canary.weight, canary.agreed, canary.differed, canary.dropped) == ("digits", 20, 8, 1, 0)
    assert (canary.worst_error, canary.latency_ratio) == (0.5, None)
    idle = reading(1, "", model())
    assert load(idle, idle, idle).canaries == []
