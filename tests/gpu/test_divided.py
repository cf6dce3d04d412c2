"""Models that are divided over processes with a GPU each, by NCCL; this needs two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.runtime.machine import devices
from tests.gpu.cuda import GPU
from tests.support import RunIngot

torch = pytest.importorskip("torch", reason="needs PyTorch, which is not installed")
pytestmark = [
    *GPU,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch with CUDA"),
    pytest.mark.skipif(devices.gpu_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize("planned", [True, False], ids=["by its plan", "in stages"])
def test_a_divided_model_answers_as_one_process_does(run_ingot: RunIngot, tmp_path: Path, planned: bool) -> None:
    from tests.export.decoders import PLAN
    from tests.server.outside import serving
    from tests.server.test_sharding import check_answers, export

    source = export(run_ingot, tmp_path, plan=PLAN if planned else None)
    options = ("--shards", "2", "--allow-code", "--device", "cuda:0,1")
    with serving("fast", tmp_path, *options, sources=[source]) as service:
        check_answers(service)
