"""Settings: from options, variables and Python alike, and the messages for wrong ones."""

from __future__ import annotations

import difflib
import re
from typing import Any

import pytest

import ingot
from ingot.config import ServerConfig, given
from ingot.config.model import ModelConfig
from ingot.errors import InvalidArgument, Unsupported
from tests.support import ROOT

SETTINGS = ServerConfig.settings()
TIMES = [name for name, setting in SETTINGS.items() if setting.duration and not setting.file_only]


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
def test_a_text_that_is_not_a_duration_is_named_as_the_user_wrote_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    problem = f"is '{text}': not a duration; write it as 50ms"
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
def test_a_duration_out_of_its_limits_is_shown_as_written_with_them(name: str, given: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig.of({name: given})
    assert str(caught.value) == says


def test_management_and_the_watch_of_aliases_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig.of({"watch": "off"}).watch is ServerConfig.of({"watch": None}).watch is None
    with pytest.raises(InvalidArgument, match=r"^management_grpc needs management, which is off; leave one out"):
        ServerConfig.of({"management": "off", "management_grpc": "localhost:1", "auth": "keys.toml"})
    assert ServerConfig.of({"management": "off"}).shows_page
    for name, default in (("management", "a Unix socket"), ("watch", "30s")):
        with pytest.raises(InvalidArgument, match=f"^{name} is 'on'; leave it out for the default, {default}$"):
            ServerConfig.of({name: "on"})
    assert ServerConfig.of({"management": "off", "management_grpc": "off"}).management_grpc is None
    monkeypatch.setenv("INGOT_WATCH", "off")
    assert ServerConfig.of({}).watch is None
    assert ServerConfig.of({"management": "off"}).summary == "management off, watch off"


def test_a_setting_of_the_file_alone_has_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CANARY", "5,25")
    with pytest.raises(InvalidArgument, match=r"^INGOT_CANARY has no effect: set canary in the configuration file$"):
        ServerConfig.of({})


def test_both_protocols_need_separate_ports() -> None:
    with pytest.raises(InvalidArgument, match=r"^http_port and grpc_port are both 8000"):
        ServerConfig.of({"http_port": 8000, "grpc_port": 8000})
    with pytest.raises(InvalidArgument, match=r"^--http-port and --grpc-port are both 8000"):
        ServerConfig.of({"http_port": 8000, "grpc_port": 8000}, options=True)
    assert ServerConfig.of({"http_port": 0, "grpc_port": 0}).http_port == 0


TLS, KEYS = {"tls_cert": "a.pem", "tls_key": "a.key"}, {"auth": "keys.toml"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "inference.example", ""])
def test_an_address_of_other_machines_needs_tls_and_access_control(host: str) -> None:
    for settings, lacks in (({}, r"TLS .* and without access control"), (TLS, "access control"), (KEYS, "TLS")):
        with pytest.raises(InvalidArgument, match=rf"^--host is {host}, which .* without {lacks}.* or --insecure"):
            ServerConfig.of({"host": host, **settings}, options=True)
    for enough in ({**TLS, **KEYS}, {**TLS, "tls_client_ca": "ca.pem"}, {"insecure": True}):
        assert ServerConfig.of({"host": host, **enough}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_local_address_needs_neither(host: str) -> None:
    assert ServerConfig.of({"host": host}).host == host


def test_the_variable_for_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_HOST", "0.0.0.0")
    with pytest.raises(InvalidArgument, match=r"^INGOT_HOST is 0\.0\.0\.0"):
        ServerConfig.of({})
    monkeypatch.setenv("INGOT_INSECURE", "1")
    assert ServerConfig.of({}).insecure


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, ""),
        ({"http_port": 0, "host": "::1", "slo": None, "max_batch": 64}, ""),
        ({"slo": "50ms", "max_batch": 128}, "max_batch 128, slo 50ms"),
        ({"ready_delay": "5m", "choice_time": "50us"}, "ready_delay 5m, choice_time 50us"),
    ],
)
def test_settings_other_than_defaults_are_reported(settings: dict[str, Any], told: str) -> None:
    assert ServerConfig.of(settings).summary == told


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("max_batch", "many", "is 'many': it must be a whole number, at least 1"),
        ("max_batch", "1.5", "is '1.5': it must be a whole number, at least 1"),
        ("threads", "", "is '': it must be a whole number, at least 1 and at most 1024"),
        ("http_port", "99999", "is '99999': it must be a whole number, at least 0 and at most 65535"),
        ("record_share", "2", "is '2': it must be a number, over 0 and at most 1"),
        ("allow_code", "perhaps", "is 'perhaps': it must be true or false"),
        ("device", "gpu", "is 'gpu': it must be auto, cpu, cuda, or cuda:0,1 with the indices of GPUs"),
        ("variant_choice", "any", "is 'any': it must be measured or preferred"),
    ],
)
def test_a_wrong_variable_is_reported_with_its_valid_values(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, says: str
) -> None:
    monkeypatch.setenv(f"INGOT_{name.upper()}", given)
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig.of({})
    assert str(caught.value) == f"INGOT_{name.upper()} {says}"


@pytest.mark.parametrize("kind", [list, dict, object])
def test_an_object_of_another_kind_is_refused_too(kind: type) -> None:
    for name in SETTINGS:
        with pytest.raises(InvalidArgument, match=rf"^{name} is .*: it must be \w+"):
            ServerConfig.of({name: kind()})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("INGOT_MAX_BATHC", "did you mean INGOT_MAX_BATCH?"),
        ("INGOT_HTTP_PROT", "did you mean INGOT_HTTP_PORT?"),
        ("INGOT_GPRC_PORT", "did you mean INGOT_GRPC_PORT?"),
        ("INGOT_HTPP_PORT", "did you mean INGOT_HTTP_PORT?"),
        ("INGOT_HOMES", "did you mean INGOT_HOME?"),
        ("INGOT_QZX", "docs/reference/settings.md lists them"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    monkeypatch.setenv(name, "9000")
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig.of({})
    assert str(caught.value) == f"unknown environment variable {name}; {says}"


@pytest.mark.parametrize(
    "name",
    [
        "INGOT_HOME",
        "INGOT_REQUIRE_TOOLS",
        "INGOT_SERVICE_HOST",
        "INGOT_SERVICE_PORT_HTTP",
        "INGOT_PORT",
        "INGOT_PORT_8000_TCP",
        "INGOT_PORT_8000_TCP_ADDR",
        "INGOT_GATEWAY_SERVICE_HOST",
        "INGOT_GATEWAY_PORT_80_TCP_PROTO",
        "INGOTS",
    ],
)
def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of other commands, and those that Kubernetes makes where a service is called ingot."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    ServerConfig.of({})


def test_a_port_of_kubernetes_is_recognized_by_the_host_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_GATEWAY_PORT", "9000")
    with pytest.raises(InvalidArgument, match="INGOT_GATEWAY_PORT"):
        ServerConfig.of({})
    monkeypatch.setenv("INGOT_GATEWAY_SERVICE_HOST", "10.0.0.1")
    ServerConfig.of({})


def test_every_variable_that_the_code_reads_is_known() -> None:
    read = set()
    for path in (ROOT / "ingot").rglob("*.py"):
        read |= set(re.findall(r"[\"'](INGOT_[A-Z_]*[A-Z])[\"']", path.read_text()))
    settings = {f"INGOT_{name.upper()}" for name in SETTINGS}
    assert read - settings <= set(given.OTHER_VARIABLES)


def test_an_engine_that_does_not_exist_is_refused_though_models_name_theirs() -> None:
    with pytest.raises(Unsupported, match="unknown engine 'nonsense'; there are onnxruntime, openvino"):
        assert ServerConfig(engine="nonsense").runtime


def test_only_the_beginning_of_a_long_name_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of management chooses the name, and difflib indexes each character."""
    compared: list[int] = []
    real = difflib.get_close_matches

    def close(word: str, *others: Any) -> list[str]:
        compared.append(len(word))
        return real(word, *others)

    monkeypatch.setattr(difflib, "get_close_matches", close)
    with pytest.raises(InvalidArgument, match="is not a setting of a model") as caught:
        ModelConfig.of_parameters({"x" * 1_000_000: 1})
    assert compared == [100]
    assert len(str(caught.value)) < 5000


def test_a_misspelt_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match=r"^there is no setting 'htp_port'; did you mean http_port\?$"):
        ingot.serve("x", htp_port=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match=r"^there is no setting 'qqq'; docs/reference/settings.md lists them$"):
        ingot.serve("x", qqq=1)  # type: ignore[call-arg]
