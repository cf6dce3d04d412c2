"""PyTorch's engines on an NVIDIA GPU; ``pytest -m gpu`` runs only tests like these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import TooLarge
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.machine import devices
from ingot.tensors import Array, DType

torch = pytest.importorskip("torch", reason="needs PyTorch, which is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.has_cuda(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch with CUDA"),
]

GRAPHS = GraphOptions(most=16, batch="batch", padded=True)


@pytest.fixture(scope="module", params=[None, GRAPHS], ids=["eager", "graphs"])
def graphs(request: pytest.FixtureRequest) -> GraphOptions | None:
    found: GraphOptions | None = request.param
    return found


@pytest.mark.parametrize("name", ["mlp", "resnet50", "bert", "decoder"])
def test_lanes_in_threads_answer_as_the_cpu(tmp_path: Path, name: str, graphs: GraphOptions | None) -> None:
    from benchmarks.gpu.models import specs, write_program

    spec, path = specs(small=True)[name], tmp_path / "model.pt2"
    write_program(spec, path, DType.FP32)
    cpu = load_engine(EngineSpec(path, format="pt2", device="cpu", allow_code=True))
    engine = load_engine(EngineSpec(path, format="pt2", device="cuda", allow_code=True, graphs=graphs))
    lanes = [engine, *engine.more_lanes(2)]
    assert len(lanes) == 3
    random = np.random.default_rng(1)
    feeds = [
        {"x": np.concatenate([spec.sample(random, DType.FP32) for _ in range(1 + number % 20)])}
        for number in range(120)
    ]

    def serve(index: int) -> list[dict[str, Array]]:
        return [lanes[index].run(feed) for feed in feeds[index::3]]

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(serve, range(3)))
    for number, feed in enumerate(feeds):  # only now: no answer may be overwritten by a later call
        expected = cpu.run(feed)["y"]
        np.testing.assert_allclose(answers[number % 3][number // 3]["y"], expected, rtol=1e-3, atol=1e-4)
    captured = "off" if graphs is None else "1,2,4,8,16"
    assert engine.settings["cuda_graphs"] == captured  # no capture has failed
    for lane in lanes:
        lane.close()


class Wide(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Needs far more memory than its input: 4 TB for one of 2**20 samples."""

    def forward(self, x: object) -> object:
        return (x @ x.transpose(0, 1)).sum(1, keepdim=True)  # type: ignore[attr-defined]


def test_a_batch_without_memory_fails_alone(tmp_path: Path) -> None:
    from benchmarks.gpu.models import Spec, write_program

    path = tmp_path / "model.pt2"
    write_program(Spec(Wide, (1,)), path, DType.FP32, most=1 << 20)
    engine = load_engine(EngineSpec(path, format="pt2", device="cuda", allow_code=True))
    with pytest.raises(TooLarge):
        engine.run({"x": np.ones((1 << 20, 1), np.float32)})
    assert engine.run({"x": np.ones((3, 1), np.float32)})["y"].tolist() == [[3], [3], [3]]
    engine.close()
