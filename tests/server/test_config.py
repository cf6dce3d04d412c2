"""Settings: from options, variables and Python alike, and what is said of those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import InvalidArgument
from ingot.server.config import TIMES, ServerConfig


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(("text", "seconds"), [("50us", 5e-5), ("50ms", 0.05), ("1.5s", 1.5), ("1m", 60.0)])
def test_times_are_written_alike_in_options_variables_and_python(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, seconds: float
) -> None:
    assert getattr(ServerConfig.of({name: text}), name) == pytest.approx(seconds)
    monkeypatch.setenv(f"INGOT_{name.upper()}", text)
    assert getattr(ServerConfig.of({}), name) == pytest.approx(seconds)
    assert getattr(ServerConfig.of({name: 2}), name) == 2


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("text", ["abc", "5 fortnights", "-1s", "nan", ""])
def test_a_text_that_is_no_time_is_named_with_its_option(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"--{name.replace('_', '-')} .*no time; write it as 50ms"):
        ServerConfig.of({name: text})


def test_a_bare_number_that_may_be_milliseconds_needs_a_unit() -> None:
    for name in ("slo", "max_delay"):
        with pytest.raises(InvalidArgument, match=rf"--{name.replace('_', '-')} .*write a unit: 50ms or 50s"):
            ServerConfig.of({name: "50"})
    assert ServerConfig.of({"max_delay": "0"}).max_delay == 0
    assert ServerConfig.of({"ready_delay": "10", "drain_timeout": "5"}).ready_delay == 10


@pytest.mark.parametrize(("name", "text"), [("slo", "2h"), ("slo", "0s"), ("ready_delay", "2h")])
def test_a_time_out_of_range_is_told_in_seconds(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"than .*\d seconds"):
        ServerConfig.of({name: text})


def test_both_protocols_need_ports_of_their_own() -> None:
    with pytest.raises(InvalidArgument, match="--http-port and --grpc-port are both 8000"):
        ServerConfig.of({"http_port": 8000, "grpc_port": 8000})
    assert ServerConfig.of({"http_port": 0, "grpc_port": 0}).http_port == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"http_port": 0, "host": "0.0.0.0", "slo": None, "max_batch": 64}, ""),
        ({"slo": "50ms", "max_batch": 128}, "max_batch 128, slo 50ms"),
        ({"ready_delay": "5m", "choice_time": "50us"}, "choice_time 50us, ready_delay 300s"),
    ],
)
def test_what_is_not_the_default_is_told(settings: dict[str, Any], told: str) -> None:
    assert ServerConfig.of(settings).told == told
