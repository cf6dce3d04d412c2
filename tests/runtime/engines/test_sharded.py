"""Programs that are divided over processes: by a plan as DTensors, and in stages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument
from ingot.export.lower import program as lower_program
from ingot.runtime import EngineSpec
from ingot.runtime.engines.opening import open_engine
from ingot.runtime.engines.pytorch import torch_engine
from ingot.runtime.engines.sharding import sharded, tensor_parallel
from ingot.runtime.engines.sharding.stages import stages_of
from tests.export import decoders
from tests.export.programs import capture
from tests.runtime.engines.sharded_cases import CASES
from tests.support import ROOT


def program_of(module: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), (torch.zeros((2, 4), dtype=torch.int64),))


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 4])
def test_divided_programs_equal_the_original(tmp_path: Path, count: int) -> None:
    """Also operators for which there is no rule, random and branching ones, and heads that cannot be divided."""
    command = ["-m", "torch.distributed.run", "--log-dir=/dev/null", f"--nproc-per-node={count}"]
    command += ["-m", "tests.runtime.engines.sharded_cases", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    assert errors.keys() == CASES.keys()
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.matrix
def test_stages_have_equal_shares_and_cuts_where_little_crosses() -> None:
    module = program_of(decoders.Decoder(layers=6)).module(check_guards=False)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    stages = stages_of(module, 3)
    held = [sum(module.get_parameter(name).nbytes for name in stage.weights) for stage in stages]
    assert max(held) < 1.5 * min(held)
    assert [len(stage.incoming) for stage in stages] == [1, 1, 1]
    assert stages[0].outgoing == stages[1].incoming
    with pytest.raises(InvalidArgument, match="cannot be cut into 1000 stages"):
        stages_of(module, 1000)


@pytest.mark.matrix
def test_weights_are_divided_as_the_plan_says() -> None:
    program = program_of(decoders.Decoder())
    plan = {"layers.0.up": "colwise", "layers.*.down": "rowwise", "embed": "rowwise", "head": "colwise"}
    dims = tensor_parallel.divided_weights(program, plan)  # type: ignore[arg-type]
    assert dims == {
        "embed.weight": 0,
        "layers.0.up.weight": 0,
        "layers.0.up.bias": 0,
        "layers.0.down.weight": 1,
        "layers.1.down.weight": 1,
        "head.weight": 0,
        "head.bias": 0,
    }
    up, bias = program.state_dict["layers.0.up.weight"].clone(), program.state_dict["layers.0.down.bias"]
    tensor_parallel.divide(program, dims, rank=1, count=2)
    assert torch.equal(program.state_dict["layers.0.up.weight"], up[64:])
    assert program.state_dict["layers.1.down.weight"].shape == (32, 64)
    assert program.state_dict["layers.0.down.bias"] is bias
    with pytest.raises(InvalidArgument, match=r"dimension 0 of embed\.weight has 24 elements, .* over 5 processes"):
        tensor_parallel.divide(program, dims, rank=1, count=5)
    with pytest.raises(InvalidArgument, match="divides no weight"):
        tensor_parallel.divided_weights(program, {"other": "colwise"})
    with pytest.raises(InvalidArgument, match=r"divides layers\.0\.norms\.0\.weight rowwise, which is not a matrix"):
        tensor_parallel.divided_weights(program, {"layers.*.norms.*": "rowwise"})


def test_what_is_not_a_connection_is_not_left_open_twice(tmp_path: Path) -> None:
    """A process that uses a GPU has dozens of such files."""

    def descriptors() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    with (tmp_path / "file").open("w"), socket.socket() as connection:
        before = descriptors()
        sharded._send_at_once()
        assert descriptors() == before
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_divided_model_on_gpus_is_computed_in_the_precision_of_its_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lower_program.lower(capture(nn.Linear(3, 2), "x:float32[batch,3]").program, tmp_path / "model.pt2")
    used: list[str] = []
    monkeypatch.setattr(torch_engine, "use_torch_precision", used.append)
    monkeypatch.setattr(sharded, "_device_of", lambda device, rank: f"cuda:{rank}")
    monkeypatch.setattr(sharded.ShardedEngine, "_load", lambda *_: None)
    for name, value in (("get_rank", 1), ("get_world_size", 2), ("all_gather_object", None)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    options: dict[str, Any] = {"format": "pt2", "shards": 2, "allow_code": True, "device": "cuda"}
    for precision in ("f32", "tf32"):
        assert open_engine(EngineSpec(path, precision=precision, **options)).device == "cuda:1"
    assert used == ["f32", "tf32"]
