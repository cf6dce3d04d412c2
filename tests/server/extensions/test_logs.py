"""The extension logging: clients read what the server logs, and change it if it allows that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

import ingot
from ingot import RunningServer
from tests import onnx_models
from tests.server.extensions.conftest import Triton, clients


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    """The logger, at level warning; what a test changes is restored."""
    logger = logging.getLogger("ingot")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield logger
    logger.setLevel(before)


@pytest.fixture
def changeable(tmp_path: Path, level: logging.Logger) -> Iterator[RunningServer]:
    model = str(onnx_models.affine(tmp_path))
    with ingot.serve(model, http_port=0, grpc_port=0, log_control=True) as running:
        yield running
    assert level.level == logging.WARNING  # which the server restores


@pytest.fixture
def triton(changeable: RunningServer, protocol: str) -> Iterator[Triton]:
    for both in clients(changeable):
        yield both[protocol]


def read(triton: Triton, found: Any = None) -> dict[str, Any]:
    found = triton.client.get_log_settings() if found is None else found
    if isinstance(found, dict):
        return found
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in found.settings.items()}


DEFAULT = {
    "log_file": "",
    "log_info": False,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
STEPS: list[tuple[dict[str, Any], int]] = [
    ({"log_info": True}, logging.INFO),
    ({"log_verbose_level": 2}, logging.DEBUG),
    ({"log_verbose_level": 0}, logging.INFO),
    ({"log_info": True, "log_verbose_level": 1}, logging.DEBUG),
    ({"log_warning": False}, logging.ERROR),
    ({"log_error": False}, logging.CRITICAL),
    ({"log_file": "", "log_format": "default", "log_warning": True, "log_info": False}, logging.WARNING),
]


def test_settings_change_what_is_logged(triton: Triton, level: logging.Logger) -> None:
    assert read(triton) == DEFAULT
    flags = {"log_error": logging.ERROR, "log_warning": logging.WARNING, "log_info": logging.INFO}
    for wanted, expected in STEPS:
        found = read(triton, triton.client.update_log_settings(wanted))
        assert level.level == expected
        assert found == read(triton)
        assert {name: found[name] for name in flags} == {name: expected <= own for name, own in flags.items()}
        assert found["log_verbose_level"] == int(expected <= logging.DEBUG)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"log_file": "/tmp/x"}, "cannot be changed"),
        ({"log_format": "ISO8601"}, "cannot be changed"),
        ({"log_errors": True}, "no log setting 'log_errors'"),
        ({"log_info": True, "log_warning": False}, "contradict"),
        ({"log_verbose_level": 1, "log_error": False}, "contradict"),
    ],
    ids=str,
)
def test_wrong_settings_change_nothing(triton: Triton, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(InferenceServerException, match=says):
        triton.client.update_log_settings({"log_info": True, **wanted})
    assert read(triton) == DEFAULT


@pytest.mark.parametrize("protocol", ["http"])
def test_values_of_other_types(triton: Triton) -> None:
    for wanted, says in (({"log_info": 1}, "true or false"), ({"log_verbose_level": True}, "a whole number")):
        with pytest.raises(InferenceServerException, match=f"must be {says}"):
            triton.client.update_log_settings(wanted)


def test_by_default_clients_only_read_them(server: RunningServer, protocol: str) -> None:
    for both in clients(server):
        triton, before = both[protocol], logging.getLogger("ingot").level
        assert read(triton).keys() == DEFAULT.keys()
        with pytest.raises(InferenceServerException, match="--log-control allows it"):
            triton.client.update_log_settings({"log_error": False})
        assert logging.getLogger("ingot").level == before
