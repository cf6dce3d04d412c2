"""Which models can be divided over processes, before any process is started."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ingot.errors import Unsupported
from ingot.runtime import Settings
from ingot.runtime.engines.isolation import policy
from ingot.runtime.machine import devices


@pytest.mark.parametrize(
    ("format_", "settings", "gpus", "fault"),
    [
        ("onnx", {}, 0, "'onnx' cannot be divided over 2 processes; export it with --to pt2"),
        ("partitioned", {}, 0, "'partitioned' cannot be divided"),
        ("pt2", {"isolate": "none"}, 0, "leave out --isolate none"),
        ("pt2", {"instances": 2}, 0, "leave out --instances 2"),
        ("pt2", {"device": "cuda"}, 0, "there is no NVIDIA driver or GPU; give --device cpu"),
        ("pt2", {"device": "cuda"}, 1, "needs 2 GPUs, and 1 GPU is visible; leave out --shards, or give --device cpu"),
        ("pt2", {"device": "auto"}, 1, "needs 2 GPUs, and 1 GPU is visible"),
        ("pt2", {"device": "cuda:0"}, 4, "names 1 device, and --shards 2 needs 2; name 2, or give --device cuda for"),
        ("pt2", {"device": "cuda:0,1,2"}, 4, "names 3 devices, and --shards 2 needs 2"),
        ("pt2", {"device": "cuda:0,1"}, 0, "there is no NVIDIA driver or GPU; give --device cpu"),
        ("pt2", {"device": "cuda:0,1"}, 1, "'cuda:1' is not available: 1 GPU is visible, counted from cuda:0"),
        ("pt2", {"device": "cuda:1,2"}, 2, "'cuda:2' is not available: 2 GPUs are visible"),
        ("pt2", {"device": "cuda:1,1"}, 4, "cuda:1,1 names a GPU twice"),
    ],
)
def test_what_cannot_be_divided_is_refused(format_: str, settings: dict[str, Any], gpus: int, fault: str) -> None:
    with mock.patch.object(devices, "gpu_count", return_value=gpus), pytest.raises(Unsupported, match=fault):
        policy.check_shards(Settings(shards=2, **settings), format_)


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda", "cuda:2,3"])
def test_what_can_be_divided_is_not(device: str) -> None:
    settings = Settings(shards=2, device=device)
    with mock.patch.object(devices, "gpu_count", return_value=4):
        policy.check_shards(settings, "pt2")
    assert settings.devices == [device]


def test_without_pytorch_the_package_is_named() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(Unsupported, match="'torch'"):
        policy.check_shards(Settings(shards=2, device="cpu"), "pt2")


@pytest.mark.parametrize(("format_", "isolated"), [("python", True), ("pt2", False)])
def test_code_in_python_is_isolated_whatever_its_risk_is_called(format_: str, isolated: bool) -> None:
    found = policy.isolation_of(Settings(isolate="none"), format_, "it is risky")
    assert (found is not None) == isolated
