from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ingot import foreign
from ingot.errors import DeadlineExceeded, IngotError, InternalError, InvalidArgument, Unavailable
from ingot.model_store import Golden
from ingot.runtime import (
    Latency,
    Limits,
    LoadSpec,
    Metrics,
    Model,
    ModelSource,
    ServingTerms,
    Settings,
    State,
    single_variant,
)
from ingot.runtime.loading.placement import Placement
from ingot.serving import Catalog
from ingot.tensors import Array, DType, Range, Signature, TensorSpec
from tests.runtime.fake_engines import FunctionEngine
from tests.runtime.waiting import wait_until

ONE = {"x": np.ones((1, 2), np.float32)}


def model(engine: FunctionEngine | None = None, goldens: Sequence[Golden] = (), **options: Any) -> Model:
    made = engine or FunctionEngine()
    settings, signature = options.pop("settings", Settings(warm_time=0)), options.pop("signature", None)
    spec = LoadSpec(lambda device, threads: made, goldens)
    return Model("m", "1", ModelSource(single_variant(spec, settings), signature), ServingTerms(settings), **options)


def golden(output: float) -> Golden:
    return Golden(ONE, {"y": np.full((1, 2), output, np.float32)})


def test_what_is_read_of_a_model_survives_its_end_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    served = model()
    served.load()
    found = served._loaded
    names = (
        "in_flight",
        "waiting",
        "wait",
        "last_batch",
        "last_use",
        "workers",
        "direct",
        "statistics",
    )
    for name in names:
        left = [found]  # close() takes it away after the first time that it is read

        def once(_: Model, left: list[Any] = left) -> Any:
            return left.pop() if left else None

        with monkeypatch.context() as patch:
            patch.setattr(Model, "_loaded", property(once), raising=False)
            read = getattr(served, name)
            assert name != "statistics" or read().described["state"] == "ready"
            assert not left
    served.close()


async def test_it_answers_when_loaded_and_not_before_or_after() -> None:
    served = model()
    with pytest.raises(Unavailable, match="loading"):
        await served.infer(ONE)
    served.load()
    assert served.ready
    assert (await served.infer(ONE))["y"].tolist() == [[2, 2]]
    await served.drain()
    with pytest.raises(Unavailable, match="draining"):
        await served.infer(ONE)
    served.close()
    assert served.state is State.UNLOADED


def test_goldens_are_replayed_before_it_is_ready() -> None:
    served = model(goldens=[golden(2.0)])
    served.load()
    assert served.ready
    served.close()


def test_a_model_that_answers_other_than_its_goldens_is_not_served() -> None:
    served = model(goldens=[golden(2.5)])
    with pytest.raises(InternalError, match="output 'y' of golden case 0"):
        served.load()
    assert served.state is State.FAILED
    with pytest.raises(Unavailable, match="failed"):
        asyncio.run(served.infer(ONE))


def test_a_load_that_was_given_up_closes_what_is_its_own_and_nothing_else() -> None:
    gate, tested = threading.Event(), threading.Event()

    def doubled(inputs: Mapping[str, Array]) -> dict[str, Array]:
        tested.set()
        assert gate.wait(60)
        return {"y": inputs["x"] * 2}

    engines = [FunctionEngine(doubled), FunctionEngine()]
    remaining = iter(engines)
    form = LoadSpec(lambda device, threads: next(remaining), [golden(2.0)])
    served = Model("m", "1", ModelSource(single_variant(form)), ServingTerms(Settings(warm_time=0)))
    placement = Placement(devices=["cuda:0"])
    placement.release = released = Mock()  # type: ignore[method-assign]
    failures: list[Exception | None] = []
    first = threading.Thread(target=lambda: failures.append(foreign.outcome(lambda: served.load(parkable=True))))
    first.start()
    assert tested.wait(60)
    served._loader.placement = placement
    with pytest.raises(Unavailable, match="an earlier load of model 'm' version 1, which took too long, has not ended"):
        served.load(parkable=True)
    assert served.give_up("its load took too long")
    served.close(0)
    assert not released.called  # the engines of the load are in memory still
    gate.set()
    first.join(60)
    assert "cannot become warming: it is unloaded" in str(failures[0])
    assert (engines[0].closed, released.called) == (True, True)
    with pytest.raises(InternalError, match="given up before it began"):
        served.load(parkable=True, wanted=lambda: False)
    served.load(parkable=True)
    assert (served.state, engines[1].closed, served.give_up("")) == (State.READY, False, False)
    served.close()


def test_a_model_that_cannot_be_opened_has_failed_with_the_reason() -> None:
    def refuse(device: str, threads: int) -> FunctionEngine:
        raise InvalidArgument("no such file")

    served = Model("m", "1", ModelSource(single_variant(LoadSpec(refuse))))
    with pytest.raises(InvalidArgument):
        served.load()
    assert (served.state, served.reason) == (State.FAILED, "no such file")


async def test_requests_that_wait_form_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches pay, even on a busy machine, and how long a call was held at the gate changes nothing.
    monkeypatch.setattr(
        "ingot.runtime.loading.warmup.measure", lambda *_: Latency({1: 0.001, 2: 0.001, 4: 0.001, 8: 0.001})
    )
    monkeypatch.setattr(Latency, "learn", lambda *_: None)

    gate = threading.Event()
    gate.set()
    engine = FunctionEngine(gate=gate)
    served = model(engine)
    served.load()
    gate.clear()
    engine.calls.clear()
    first = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    rest = [asyncio.create_task(served.infer({"x": np.full((1, 2), n, np.float32)})) for n in range(5)]
    await asyncio.sleep(0)
    gate.set()
    answers = await asyncio.gather(first, *rest)
    assert engine.calls == [1, 5]
    assert [answer["y"][0, 0] for answer in answers[1:]] == [0, 2, 4, 6, 8]
    await served.drain()
    served.close()


async def test_a_disconnected_client_is_skipped_without_harm_to_others() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = model(engine)
    served.load()
    running = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    waiting = asyncio.create_task(served.infer(ONE))
    staying = asyncio.create_task(served.infer(ONE))
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()  # this one is in the engine already
    await asyncio.sleep(0)
    gate.set()
    assert (await staying)["y"].tolist() == [[2, 2]]
    assert engine.calls == [1, 1]
    await served.drain()
    served.close()


async def test_a_timeout_answers_without_the_engine() -> None:
    gate = threading.Event()
    served = model(FunctionEngine(gate=gate))
    served.load()
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await served.infer(ONE, timeout=0.01)
    gate.set()
    assert (await served.infer(ONE))["y"].tolist() == [[2, 2]]
    await served.drain()
    served.close()


async def test_a_full_queue_refuses_and_waiting_requests_are_answered() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = model(engine, settings=Settings(warm_time=0, limits=Limits(max_queue=2)))
    served.load()
    tasks = [asyncio.create_task(served.infer(ONE))]
    await wait_until(lambda: engine.calls)
    tasks += [asyncio.create_task(served.infer(ONE)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, Unavailable) for outcome in outcomes] == [False, False, False, True]
    await served.drain()
    served.close()


async def test_draining_waits_for_what_is_in_flight() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = model(engine)
    served.load()
    asked = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    draining = asyncio.create_task(served.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    gate.set()
    await draining
    assert (await asked)["y"].tolist() == [[2, 2]]
    served.close()
    assert engine.closed


async def test_instances_run_side_by_side() -> None:
    gate = threading.Event()
    engines: list[FunctionEngine] = []

    def open_engine(device: str, threads: int) -> FunctionEngine:
        engines.append(FunctionEngine(gate=gate))
        return engines[-1]

    terms = ServingTerms(Settings(instances=2, warm_time=0))
    served = Model("m", "1", ModelSource(single_variant(LoadSpec(open_engine))), terms)
    served.load()
    tasks = [asyncio.create_task(served.infer(ONE))]
    await wait_until(lambda: sum(len(engine.calls) for engine in engines) == 1)
    tasks.append(asyncio.create_task(served.infer(ONE)))
    await wait_until(lambda: sum(len(engine.calls) for engine in engines) == 2)
    assert [engine.calls for engine in engines] == [[1], [1]]
    gate.set()
    await asyncio.gather(*tasks)
    await served.drain()
    served.close()
    assert all(engine.closed for engine in engines)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "missing"),
        ({"x": np.ones((1, 2))}, "FP64"),
        ({"x": np.ones((1, 3), np.float32)}, "dimension 1"),
        ({**ONE, "w": np.ones(1)}, "unknown input 'w'"),
    ],
)
async def test_inputs_are_checked_before_they_wait(inputs: dict[str, Array], says: str) -> None:
    engine = FunctionEngine()
    served = model(engine)
    served.load()
    with pytest.raises(IngotError, match=says):
        await served.infer(inputs)
    assert engine.calls == []
    served.close()


async def test_an_engine_that_ends_its_thread_fails_only_its_calls() -> None:
    def leave(inputs: Any) -> Any:
        raise SystemExit

    served = model(FunctionEngine(leave))
    served.load()
    for _ in range(2):
        with pytest.raises(InternalError):
            await served.infer(ONE)
    served.close()


def test_a_signature_that_is_not_the_engines_is_refused_and_the_engine_closed() -> None:
    engine = FunctionEngine()
    other = Signature(
        (TensorSpec("x", DType.FP32, ("batch", 2)),), (TensorSpec("w", DType.FP32, ("batch", 2)),), "batch"
    )
    served = model(engine, signature=other)
    with pytest.raises(InvalidArgument, match="outputs are 'y', not 'w'"):
        served.load()
    assert (served.state, engine.closed) == (State.FAILED, True)


def test_an_unforeseen_failure_at_load_is_internal_and_reported() -> None:
    def explode(device: str, threads: int) -> FunctionEngine:
        raise MemoryError("no room")

    served = Model("m", "1", ModelSource(single_variant(LoadSpec(explode))))
    with pytest.raises(InternalError, match="no room"):
        served.load()
    assert served.state is State.FAILED


@pytest.mark.parametrize("call", [2, 3])
def test_an_engine_that_fails_while_it_is_timed_is_closed_and_not_served(call: int) -> None:
    def explode(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if len(engine.calls) >= call:
            raise MemoryError("no room")
        return {"y": inputs["x"] * 2}

    engine = FunctionEngine(explode)
    served = model(engine, goldens=[golden(2.0)], settings=Settings(warm_time=10))
    with pytest.raises(InternalError, match="no room"):
        served.load()
    assert (served.state, engine.closed) == (State.FAILED, True)
    with pytest.raises(Unavailable, match="failed"):
        asyncio.run(served.infer(ONE))


async def test_batches_stay_within_the_range_that_was_proved() -> None:
    signature = Signature(
        (TensorSpec("x", DType.FP32, ("batch", 2)),),
        (TensorSpec("y", DType.FP32, ("batch", 2)),),
        "batch",
        {"batch": Range(1, 4)},
    )

    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = model(engine, signature=signature)
    served.load()
    tasks = [asyncio.create_task(served.infer({"x": np.ones((3, 2), np.float32)})) for _ in range(6)]
    await wait_until(lambda: engine.calls)
    gate.set()
    await asyncio.gather(*tasks)
    assert max(engine.calls) <= 4
    served.close()


async def test_clients_that_gave_up_do_not_fill_the_queue() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = model(engine, settings=Settings(warm_time=0, limits=Limits(max_queue=2)))
    served.load()
    running = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    for _ in range(5):
        with pytest.raises(DeadlineExceeded):
            await served.infer(ONE, timeout=0.001)
    staying = asyncio.create_task(served.infer(ONE))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(running, staying)
    served.close()


def test_a_server_is_ready_unless_a_model_is_missing_or_all_have_failed() -> None:
    def ready(*models: tuple[bool, bool]) -> bool:
        catalog = Catalog(Metrics())
        for number, (loaded, failed) in enumerate(models):
            model = Mock(spec=Model, loaded=loaded, failed=failed)
            catalog._models[f"m{number}"] = {"1": model}
        return catalog.ready

    running, tried_again, loading = (True, False), (True, True), (False, False)
    assert ready(running)
    assert ready(running, tried_again)
    for models in ((), (tried_again,), (tried_again, tried_again), (running, loading)):
        assert not ready(*models)
