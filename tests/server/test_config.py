"""Settings: from options, variables and Python alike, and what is said of those that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import InvalidArgument
from ingot.server.config import TIMES, ServerConfig


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("50ms", 0.05), ("1.5s", 1.5), ("5e-3s", 5e-3), ("1m", 60.0)]
)
def test_times_are_written_alike_in_options_variables_and_python(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, seconds: float
) -> None:
    assert getattr(ServerConfig.of({name: text}), name) == pytest.approx(seconds)
    monkeypatch.setenv(f"INGOT_{name.upper()}", text)
    assert getattr(ServerConfig.of({}), name) == pytest.approx(seconds)
    assert getattr(ServerConfig.of({name: 2}), name) == 2


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("text", ["abc", "5 fortnights", "--1s", "1-1s", "nan", ""])
def test_a_text_that_is_no_time_is_named_as_the_user_wrote_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    problem = f"is '{text}': no time; write it as 50ms"
    with pytest.raises(InvalidArgument, match=f"^{name} {problem}"):
        ServerConfig.of({name: text})
    with pytest.raises(InvalidArgument, match=f"^--{name.replace('_', '-')} {problem}"):
        ServerConfig.of({name: text}, options=True)
    monkeypatch.setenv(f"INGOT_{name.upper()}", text)
    for options in (False, True):
        with pytest.raises(InvalidArgument, match=f"^INGOT_{name.upper()} {problem}"):
            ServerConfig.of({}, options=options)


def test_a_bare_number_that_may_be_milliseconds_needs_a_unit() -> None:
    for name in ("slo", "max_delay"):
        with pytest.raises(InvalidArgument, match=rf"^{name} is '50': write a unit: 50ms or 50s"):
            ServerConfig.of({name: "50"})
    assert ServerConfig.of({"max_delay": "0"}).max_delay == 0
    assert ServerConfig.of({"ready_delay": "10", "drain_timeout": "5"}).ready_delay == 10


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("slo", "10h", "slo is '10h': it must be over 0 and at most 1h"),
        ("slo", "0ms", "slo is '0ms': it must be over 0 and at most 1h"),
        ("slo", "-5ms", "slo is '-5ms': it must be over 0 and at most 1h"),
        ("slo", 36000, "slo is 36000 seconds: it must be over 0 and at most 1h"),
        ("max_delay", "2m", "max_delay is '2m': it must be at least 0 and at most 1m"),
        ("choice_time", "0", "choice_time is '0': it must be over 0 and at most 1m"),
        ("ready_delay", "2h", "ready_delay is '2h': it must be at least 0 and at most 1h"),
        ("drain_timeout", "-1s", "drain_timeout is '-1s': it must be at least 0"),
    ],
)
def test_a_time_out_of_its_limits_is_told_as_given_with_them(name: str, given: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig.of({name: given})
    assert str(caught.value) == says


def test_both_protocols_need_ports_of_their_own() -> None:
    with pytest.raises(InvalidArgument, match=r"^http_port and grpc_port are both 8000"):
        ServerConfig.of({"http_port": 8000, "grpc_port": 8000})
    with pytest.raises(InvalidArgument, match=r"^--http-port and --grpc-port are both 8000"):
        ServerConfig.of({"http_port": 8000, "grpc_port": 8000}, options=True)
    assert ServerConfig.of({"http_port": 0, "grpc_port": 0}).http_port == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"http_port": 0, "host": "0.0.0.0", "slo": None, "max_batch": 64}, ""),
        ({"slo": "50ms", "max_batch": 128}, "max_batch 128, slo 50ms"),
        ({"ready_delay": "5m", "choice_time": "50us"}, "choice_time 50us, ready_delay 5m"),
    ],
)
def test_what_is_not_the_default_is_told(settings: dict[str, Any], told: str) -> None:
    assert ServerConfig.of(settings).told == told
