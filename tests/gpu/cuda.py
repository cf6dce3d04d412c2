"""What the tests on a GPU share: whether there is one, and a server on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingot.errors import Unsupported
from ingot.runtime.engines.ort import ort_session
from ingot.runtime.machine import devices
from tests.server.outside import Service, serving

GPU = [pytest.mark.gpu, pytest.mark.skipif(not devices.has_cuda(), reason="needs an NVIDIA GPU")]


def needs_provider(name: str) -> pytest.MarkDecorator:
    """Skip a test without a build of ONNX Runtime that has an execution provider."""
    try:
        providers = ort_session.package().get_available_providers()
    except Unsupported:
        providers = []
    lacking = f"{name}ExecutionProvider" not in providers
    return pytest.mark.skipif(lacking, reason=f"needs an onnxruntime with {name}: pip install '.[gpu]'")


@contextmanager
def on_gpu(folder: Path, *sources: Path | str, options: tuple[str, ...] = ()) -> Iterator[Service]:
    """Serve models on the first GPU, in a separate process."""
    with serving("fast", folder, "--device", "cuda:0", *options, sources=list(map(str, sources))) as service:
        yield service
