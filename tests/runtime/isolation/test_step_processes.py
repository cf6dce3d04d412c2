"""Steps in engine processes: equal values, the same errors, and an end that costs one item."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from ingot import foreign
from ingot.errors import EngineLost, InvalidArgument, TooLarge
from ingot.runtime.engines.isolation import step_processes
from ingot.runtime.engines.isolation.engine import ProcessEngine
from ingot.runtime.engines.isolation.step_processes import StepProcesses
from ingot.steps.images.decoding import Limits
from ingot.steps.images.image import Image
from ingot.steps.images.operations import Normalize, Rescale, Resize
from ingot.steps.images.pictures import drawn
from ingot.tensors import Array
from tests.runtime.isolation.test_process_engine import pid_of
from tests.server.outside import wait_until

STEP = Image(
    operations=(
        Resize(rule="exact", height=96, width=80),
        Rescale(factor=1 / 255),
        Normalize(mean=(0.5,) * 3, std=(0.5,) * 3),
    )
)


def images(contents: list[bytes]) -> dict[str, Array]:
    array = np.empty(len(contents), object)
    array[:] = contents
    return {"image": array}


@pytest.fixture(scope="module")
def lost() -> list[str]:
    return []


@pytest.fixture(scope="module")
def processes(lost: list[str]) -> Iterator[StepProcesses]:
    with contextlib.closing(StepProcesses(STEP, 2, None, 60)) as opened:
        opened.supervise("m", lost.append)
        yield opened


def test_a_process_that_does_not_start_is_an_error_and_the_next_item_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise EngineLost("it does not start")

    with contextlib.closing(StepProcesses(STEP, 1, None, 60)) as opened:
        with monkeypatch.context() as patched:
            patched.setattr(step_processes, "ProcessEngine", fail)
            for _ in range(2):
                with pytest.raises(EngineLost, match="it does not start"):
                    opened.apply(images([*drawn(1)]))
        assert opened.running == 0
        opened.apply(images([*drawn(1)]))
        assert opened.running == 1


def test_processes_start_with_items_and_end_without(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ProcessEngine] = []

    def start(*arguments: Any) -> ProcessEngine:
        started.append(ProcessEngine(*arguments))
        return started[-1]

    monkeypatch.setattr(step_processes, "ProcessEngine", start)
    with contextlib.closing(StepProcesses(STEP, 2, None, 60, idle=0.2)) as opened:
        assert opened.running == 0
        values = images([*drawn(4)])
        first = opened.apply(values)["pixel_values"]
        assert len(started) == 2  # the first may have ended before the second has started
        wait_until(lambda: opened.running == 0)
        assert np.array_equal(opened.apply(values)["pixel_values"], first)


def test_each_process_ends_at_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, timers, closed = [0.0], list[Any](), list[str]()

    def timer(seconds: float, function: Any) -> Any:
        timers.append((seconds, function))
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    monkeypatch.setattr(step_processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(step_processes, "Timer", timer)
    processes: Any = StepProcesses(STEP, 2, None, 60, idle=300)
    processes._engines = [SimpleNamespace(close=lambda name=name: closed.append(name)) for name in "ab"]
    for now[0], engine in zip((0.0, 100.0), processes._engines, strict=True):
        processes._return(engine)
    for now[0] in (300.0, 400.0):
        timers[-1][1]()
    assert closed == ["a", "b"]
    assert [seconds for seconds, _ in timers] == [300, 100]


def test_values_and_errors_are_those_of_the_step(processes: StepProcesses) -> None:
    here = STEP.open(lambda name: b"")
    values = images([*drawn(16, seed=3)])
    assert np.array_equal(processes.apply(values)["pixel_values"], here(values)["pixel_values"])
    for content in (b"text", b"", next(drawn(1))[:-200]):
        wrong = images([next(drawn(1)), content])
        with pytest.raises(InvalidArgument) as expected:
            here(wrong)
        with pytest.raises(InvalidArgument) as raised:
            processes.apply(wrong)
        assert str(raised.value) == str(expected.value)


def test_processes_cannot_open_files_or_sockets(processes: StepProcesses) -> None:
    processes.apply(images([*drawn(1)]))
    assert {"no opening of files", "no writing of files", "no programs"} <= {*processes.measures}
    assert any(measure.startswith("no sockets") for measure in processes.measures)


@pytest.mark.matrix
def test_damaged_files_end_no_process(processes: StepProcesses, lost: list[str]) -> None:
    """Files with changed bytes are decoded or refused; nothing that a decoder imports is missing."""
    random = np.random.default_rng(5)
    ends = len(lost)
    for content in drawn(24, seed=4):
        changed = np.frombuffer(content, np.uint8).copy()
        places = random.integers(0, len(changed), 1 + len(changed) // 200)
        changed[places] = random.integers(0, 256, len(places))
        error = foreign.outcome(functools.partial(processes.apply, images([changed.tobytes()])))
        assert isinstance(error, dict | InvalidArgument | TooLarge)
        assert "not permitted" not in str(error)
    assert len(lost) == ends


@pytest.mark.matrix
def test_an_item_that_needs_too_much_memory_is_refused() -> None:
    small = STEP.model_copy(update={"limits": Limits(pixels=100_000_000)})
    with contextlib.closing(StepProcesses(small, 1, 200, 60)) as opened:
        file = BytesIO()
        Pillow.new("1", (9_000, 9_000)).save(file, "PNG")
        with pytest.raises(TooLarge, match=r"needs? more memory than its engine process may have, 200 MiB"):
            opened.apply(images([file.getvalue()]))
        opened.apply(images([*drawn(1)]))  # the process continues


def test_an_item_that_ends_its_process_costs_itself() -> None:
    first, other = drawn(2, seed=6)
    expected = STEP.open(lambda name: b"")(images([other]))["pixel_values"]
    lost: list[str] = []
    with contextlib.closing(StepProcesses(STEP, 1, None, 60)) as processes:
        processes.apply(images([other]))
        processes.supervise("m", lost.append)
        for count in (1, 2):
            os.kill(pid_of(processes._engines[0]), signal.SIGSTOP)  # a decoder that hangs: the process is killed
            with pytest.raises(EngineLost, match="the request may have caused it"):
                processes.apply(images([first]))
            assert np.array_equal(processes.apply(images([other]))["pixel_values"], expected)
            assert len(lost) == count
        with pytest.raises(InvalidArgument, match="has ended the process that decodes it 2 times, so it is refused"):
            processes.apply(images([first]))
