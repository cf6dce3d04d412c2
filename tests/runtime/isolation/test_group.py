"""An engine in a group of processes, which torchrun starts; `tests/server/test_sharding.py` has it behind a server."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import DeadlineExceeded, EngineLost
from ingot.export.lower import program as lower_program
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.machine import memory
from tests.export import decoders
from tests.export.programs import capture
from tests.server.outside import wait_until


@pytest.mark.matrix
def test_a_group_is_one_engine_and_ends_with_any_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This takes seconds, as three processes import PyTorch; nothing else of `make test` starts a group.

    The plan is longer than an argument of a program may be.
    """
    model = capture(decoders.make(), decoders.INPUT)
    path = lower_program.lower(model.program, tmp_path / "model.pt2")
    others = {*memory.engine_processes()}
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    engine = load_engine(
        EngineSpec(
            path,
            format="pt2",
            device="cpu",
            threads=1,
            allow_code=True,
            shards=2,
            plan={**decoders.PLAN, **{f"absent.{number}": "colwise" for number in range(20_000)}},
        ),
        Isolation(why="a test", required=True),
    )
    with contextlib.closing(engine):
        feeds = {"ids": np.arange(12).reshape(3, 4)}
        np.testing.assert_allclose(engine.run(feeds)["output"], model.eager.run(feeds)["output"], atol=1e-5)
        assert (engine.settings["shards"], engine.settings["split"]) == ("2", "tensor-parallel plan")
        launcher, first, second = sorted(map(int, {*memory.engine_processes()} - others))
        os.kill(second, signal.SIGKILL)
        with pytest.raises(EngineLost, match="ended, since process 1 of 2 ended by SIGKILL"):
            engine.run(feeds)
    assert not [*temporary.iterdir()]  # what its processes wrote is removed with them
    assert not {str(launcher), str(first)} & {*memory.engine_processes()}


@pytest.mark.matrix
def test_a_process_that_is_stopped_before_it_is_confined_ends_with_its_group(tmp_path: Path) -> None:
    model = capture(decoders.make(), decoders.INPUT)
    path = lower_program.lower(model.program, tmp_path / "model.pt2")
    spec = EngineSpec(path, format="pt2", device="cpu", threads=1, allow_code=True, shards=2)
    isolation = Isolation(why="a test", required=True, load_timeout=10)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load_engine, spec, isolation)
        wait_until(lambda: len(_ranks()) == 2)
        stopped = _ranks()[1]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="did not answer within"):
            loading.result()
    wait_until(lambda: not _runs(stopped))


def _ranks() -> list[int]:
    """Return the processes that torchrun has started, which this process has started."""
    found: list[int] = []
    for launcher in memory.engine_processes():
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return sorted(found)


def _runs(number: int) -> bool:
    """Return whether a process has not ended; its remains may be left to the system's first process."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
