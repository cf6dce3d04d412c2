from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import uvloop

from ingot.errors import DeadlineExceeded, IngotError, InternalError, InvalidArgument, Unavailable
from ingot.model_store import Golden
from ingot.runtime import (
    Latency,
    Limits,
    LoadSpec,
    Metrics,
    Model,
    ModelSource,
    Outcome,
    Request,
    Scheduler,
    ServingTerms,
    Settings,
    single_variant,
)
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.loading import warmup
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.runtime.fake_engines import DOUBLER, FunctionEngine
from tests.runtime.waiting import wait_until

ONE = {"x": np.ones((1, 2), np.float32)}
WIDE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", "n")),), (TensorSpec("y", DType.FP32, ("batch", "n")),), "batch"
)


def loaded(engine: FunctionEngine, goldens: tuple[Golden, ...] = (), **settings: object) -> Model:
    made = Settings(**{"warm_time": 0, **settings})  # type: ignore[arg-type]
    source = ModelSource(single_variant(LoadSpec(lambda device, threads: engine, goldens), made))
    served = Model("m", "1", source, ServingTerms(made))
    served.load()
    return served


def takes(seconds: Mapping[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the seconds that a call is expected to take, by samples, regardless of the clock."""
    monkeypatch.setattr(warmup, "measure", lambda *_: Latency(seconds))


def explode(outcome: Outcome) -> None:
    raise ValueError("unforeseen failure")


async def test_parts_whose_outputs_do_not_fit_together_fail_their_request_and_no_other() -> None:
    def ragged(inputs: Mapping[str, Array]) -> dict[str, Array]:
        samples = len(inputs["x"])
        return {"y": np.zeros((samples, samples), np.float32)}

    signature = Signature(
        (TensorSpec("x", DType.FP32, ("batch", 2)),), (TensorSpec("y", DType.FP32, ("batch", "k")),), "batch"
    )

    served = loaded(FunctionEngine(ragged, signature), limits=Limits(max_batch=4))
    large = asyncio.create_task(served.infer({"x": np.ones((6, 2), np.float32)}))
    small = asyncio.create_task(served.infer(ONE))
    with pytest.raises(InternalError, match="2 parts cannot be joined"):
        await asyncio.wait_for(large, 30)
    assert len((await asyncio.wait_for(small, 30))["y"]) == 1
    await asyncio.wait_for(served.drain(), 30)
    served.close()


@pytest.mark.parametrize(("mixes", "result"), [(True, "differed"), (False, "agreed")])
def test_requests_of_batches_run_again_alone(mixes: bool, result: str, caplog: pytest.LogCaptureFixture) -> None:
    def sum_up(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": inputs["x"] * (len(inputs["x"]) if mixes else 2)}

    metrics = Metrics()
    labels = {"model": "m", "version": "1", "result": result}

    async def work() -> None:
        settings = Settings(warm_time=0, verify_batches=0.5)
        engine = FunctionEngine(sum_up)
        source = ModelSource(single_variant(LoadSpec(lambda *_: engine), settings))
        served = Model("m", "1", source, ServingTerms(settings), metrics)
        served.load()
        for _ in range(2):  # of two batches, one is chosen
            await asyncio.gather(*[served.infer(ONE) for _ in range(3)])
        await wait_until(lambda: metrics.registry.get_sample_value("ingot_batch_checks_total", labels) == 3)
        assert sorted(engine.calls) == [1, 1, 1, 3, 3]
        assert (served.statistics().samples, served.statistics().calls) == (6, 2)  # and not those that ran again
        await served.drain()
        served.close()

    asyncio.run(work())
    assert ("a request alone has another 'y' than in a batch of 3 requests" in caplog.text) is mixes


def test_a_reply_that_fails_does_not_affect_other_replies(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        gate = threading.Event()
        engine = FunctionEngine(gate=gate)
        served = loaded(engine)
        served.submit(Request(ONE, explode))
        await wait_until(lambda: engine.calls)
        rest = [asyncio.create_task(served.infer(ONE)) for _ in range(5)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(*rest), 30)
        await asyncio.wait_for(served.drain(), 30)
        served.close()

    asyncio.run(work())
    assert "unforeseen failure" in caplog.text


def test_a_reply_to_a_late_request_that_fails_loses_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        served = loaded(FunctionEngine())
        served.submit(Request(ONE, explode, timeout=0.001))
        answers: list[Outcome] = []
        served.submit(Request(ONE, answers.append))
        time.sleep(0.002)  # meanwhile the loop is busy
        await wait_until(lambda: answers, 10)
        assert not isinstance(answers[0], IngotError)
        await asyncio.wait_for(served.drain(), 30)
        served.close()

    asyncio.run(work())
    assert "unforeseen failure" in caplog.text


def test_a_batch_that_cannot_be_learnt_from_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Latency, samples: int, seconds: float) -> None:
        raise ZeroDivisionError("no time at all")

    monkeypatch.setattr(Latency, "learn", fail)

    async def work() -> None:
        served = loaded(FunctionEngine())
        for _ in range(2):
            assert (await asyncio.wait_for(served.infer(ONE), 30))["y"].tolist() == [[2, 2]]
        served.close()

    asyncio.run(work())
    assert "no time at all" in caplog.text


async def test_times_of_small_rows_are_not_used_for_large_ones() -> None:
    def slow(inputs: Mapping[str, Array]) -> dict[str, Array]:
        time.sleep(0.002 * inputs["x"].shape[1])
        return {"y": inputs["x"]}

    engine = FunctionEngine(slow, WIDE)
    small, large = np.ones((1, 5), np.float32), np.ones((1, 500), np.float32)
    served = loaded(engine, (Golden({"x": small}, {"y": small}),), warm_time=0.1, limits=Limits(max_batch=4))
    assert (await served.infer({"x": large}, timeout=20))["y"].shape == (1, 500)
    calls = len(engine.calls)
    with pytest.raises(DeadlineExceeded, match="the model takes"):  # as one call has shown by now
        await served.infer({"x": large}, timeout=0.9)
    assert len(engine.calls) == calls
    # A hundredth of a second for the engine; the rest is for machines that are busy.
    assert (await served.infer({"x": small}, timeout=0.9))["y"].shape == (1, 5)
    await served.drain()
    served.close()


async def test_the_slo_ends_what_waits_behind_an_engine_that_hangs_and_spares_what_runs() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = loaded(engine, slo=0.05)
    running = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await asyncio.wait_for(served.infer(ONE), 20)
    assert not running.done()
    gate.set()
    assert (await running)["y"].tolist() == [[2, 2]]
    await served.drain()
    served.close()


async def test_a_timeout_of_the_client_also_ends_running_requests_for_any_slo() -> None:
    gate = threading.Event()
    served = loaded(FunctionEngine(gate=gate), slo=1000)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await asyncio.wait_for(served.infer(ONE, timeout=0.01), 20)
    gate.set()
    await served.drain()
    served.close()


async def test_a_text_input_that_holds_no_text_is_refused_and_not_in_flight() -> None:
    signature = Signature(
        (TensorSpec("x", DType.BYTES, ("batch", 1)),), (TensorSpec("y", DType.BYTES, ("batch", 1)),), "batch"
    )

    served = loaded(FunctionEngine(lambda inputs: {"y": inputs["x"]}, signature))
    with pytest.raises(InvalidArgument, match="BYTES"):
        await served.infer({"x": np.array([[7]], object)})
    assert served.statistics().described["in_flight"] == 0
    await asyncio.wait_for(served.drain(), 30)
    served.close()


async def test_a_request_that_cannot_be_taken_in_is_not_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no room")

    served = loaded(FunctionEngine())
    with monkeypatch.context() as patch:
        patch.setattr("ingot.runtime.scheduling.scheduler.Scheduler.offer", fail)
        with pytest.raises(MemoryError):
            await served.infer(ONE)
    assert (await served.infer(ONE))["y"].tolist() == [[2, 2]]
    await asyncio.wait_for(served.drain(), 30)
    served.close()


async def test_the_clock_of_a_request_that_is_answered_holds_none_of_its_bytes() -> None:
    served = loaded(FunctionEngine())
    array = np.ones((1, 2), np.float32)
    gone = weakref.ref(array)
    gc.disable()
    try:
        await served.infer({"x": array}, timeout=1000)
        del array
        await wait_until(lambda: gone() is None, 5)
    finally:
        gc.enable()
    served.close()


async def test_the_clock_continues_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = loaded(engine)
    running = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    first = asyncio.create_task(served.infer(ONE, timeout=0.01))
    second = asyncio.create_task(served.infer(ONE, timeout=0.03))
    await asyncio.sleep(0)
    remove = "ingot.runtime.scheduling.queue.Queue.remove"
    with monkeypatch.context() as patch:
        patch.setattr(remove, lambda queue, entry: 1 / 0)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(first, 20)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(second, 20)
    gate.set()
    await running
    served.close()


def test_times_that_are_up_at_once_disturb_no_later_request() -> None:
    """On uvloop, a timer that is due at once has no time."""

    async def work() -> None:
        served = loaded(FunctionEngine())
        for _ in range(50):
            asks = [served.infer(ONE, timeout=timeout) for timeout in (20, 0.0001, 0.0002, 20)]
            found = await asyncio.gather(*asks, return_exceptions=True)
            # On a busy machine, the short ones may be refused on arrival.
            assert all(isinstance(item, dict | DeadlineExceeded | Unavailable) for item in found), found
            assert all(isinstance(item, dict) for item in (found[0], found[3])), found
        await served.drain()
        served.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("cores", [1, 99])
async def test_the_event_loop_rests_while_requests_wait_for_engines_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    rests: list[float | None] = []

    class Watched(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if blocking:
                rests.append(timeout)
            return super().acquire(blocking, timeout)

    gate = threading.Event()
    monkeypatch.setattr("ingot.runtime.dispatch.dispatcher.Semaphore", Watched)
    monkeypatch.setattr("ingot.runtime.loading.assembly.cpu_count", lambda: cores)

    engine = FunctionEngine(gate=gate)
    served = loaded(engine)
    first = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    assert not rests  # no request waits
    others = [asyncio.create_task(served.infer(ONE)) for _ in range(3)]
    await wait_until(lambda: served.statistics().described["waiting"] == 3)
    await asyncio.sleep(0)
    assert bool(rests) == (cores == 1)
    assert all(rest is not None and rest <= 0.002 for rest in rests)
    gate.set()
    for answer in await asyncio.gather(first, *others):
        assert answer["y"].tolist() == [[2, 2]]
    await served.drain()
    served.close()


def test_the_clock_of_a_large_request_that_is_answered_holds_none_of_its_outputs() -> None:
    given: list[weakref.ref[Array]] = []

    def note(inputs: Mapping[str, Array]) -> dict[str, Array]:
        output = inputs["x"] * 2
        given.append(weakref.ref(output))
        return {"y": output}

    async def work() -> None:
        served = loaded(FunctionEngine(note), limits=Limits(max_batch=2))
        answer = await served.infer({"x": np.ones((5, 2), np.float32)}, timeout=3600)
        assert answer["y"].tolist() == [[2, 2]] * 5
        await wait_until(lambda: not any(output() is not None for output in given))
        assert len(given) == 3
        await served.drain()
        served.close()

    gc.disable()
    try:
        asyncio.run(work())
    finally:
        gc.enable()


def test_parts_of_a_disconnected_client_are_not_joined(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    def ragged(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": np.zeros((len(inputs["x"]),) * 2, np.float32)}  # which cannot be released, and nothing is logged

    async def work() -> None:
        engine = FunctionEngine(ragged, WIDE, gate)
        served = loaded(engine, limits=Limits(max_batch=2), instances=2)
        pending = served.submit(Request({"x": np.ones((3, 2), np.float32)}, explode))
        await wait_until(lambda: len(engine.calls) == 2)
        pending.cancel()
        gate.set()
        assert (await asyncio.wait_for(served.infer(ONE), 30))["y"].tolist() == [[0]]
        await served.drain()
        served.close()

    asyncio.run(work())
    assert not caplog.text


async def test_the_deadline_of_a_request_is_checked_with_the_time_of_all_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue is empty, so a later attempt would fail as well."""
    takes({1: 0.1, 4: 0.2}, monkeypatch)

    served = loaded(FunctionEngine(), limits=Limits(max_batch=4), slo=0.5)
    with pytest.raises(DeadlineExceeded, match=r"475ms, and the model takes 1s; allow more .* slo of 500ms"):
        await served.infer({"x": np.ones((20, 2), np.float32)})
    with pytest.raises(DeadlineExceeded, match=r"allows 800ms, and the model takes 1s; allow more time$"):
        await served.infer({"x": np.ones((20, 2), np.float32)}, timeout=0.8)
    assert len((await served.infer({"x": np.ones((8, 2), np.float32)}))["y"]) == 8
    await served.drain()
    served.close()


async def test_a_request_of_more_parts_than_may_wait_is_one_request() -> None:
    served = loaded(FunctionEngine(), limits=Limits(max_batch=1, max_queue=10))
    assert len((await served.infer({"x": np.ones((50, 2), np.float32)}))["y"]) == 50
    await served.drain()
    served.close()


async def test_the_parts_of_a_large_request_come_to_the_queue_a_few_at_a_time() -> None:
    ran: list[float] = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        ran.append(float(inputs["x"][0, 0]))
        waiting.append(served.statistics().described["waiting"])
        return {"y": inputs["x"] * 2}

    waiting: list[int] = []
    gate = threading.Event()
    engine = FunctionEngine(run, gate=gate)
    served = loaded(engine, limits=Limits(max_batch=1, max_queue=10))
    large = np.arange(200, dtype=np.float32).reshape(100, 2)

    before = len(ran)
    many = asyncio.create_task(served.infer({"x": large}))
    await wait_until(lambda: engine.calls)
    assert served.statistics().described["waiting"] == 1
    others = [asyncio.create_task(served.infer({"x": np.full((1, 2), -1 - number, np.float32)})) for number in range(9)]
    await wait_until(lambda: served.statistics().described["waiting"] == 10)
    with pytest.raises(Unavailable, match=r"the queue is full \(10 requests wait\)"):
        await served.infer(ONE)
    gate.set()
    assert ((await many)["y"] == 2 * large).all()
    assert [(await other)["y"][0, 0] for other in others] == [-2 * (1 + number) for number in range(9)]
    assert max(waiting) <= 10
    assert max(ran.index(-1 - number) for number in range(9)) - before <= 20
    await served.drain()
    served.close()


@pytest.mark.parametrize("samples", [1, 30])  # one entry, and one in parts
def test_a_refusal_is_answered_in_the_next_tick_unless_its_client_left(samples: int) -> None:
    async def work() -> None:
        gate = threading.Event()
        engine = FunctionEngine(lambda inputs: {"y": inputs["x"]}, gate=gate)
        served = loaded(engine, limits=Limits(max_batch=1, max_queue=1))
        running = asyncio.create_task(served.infer(ONE))
        await wait_until(lambda: engine.calls)
        queued = asyncio.create_task(served.infer(ONE))
        await wait_until(lambda: served.waiting == 1)
        outcomes: list[Outcome] = []
        inputs = {"x": np.ones((samples, 2), np.float32)}
        served.submit(Request(inputs, outcomes.append))
        served.submit(Request(inputs, outcomes.append)).cancel()
        assert outcomes == []
        assert served.statistics().described["in_flight"] == 3
        await asyncio.sleep(0)
        [refusal] = outcomes
        assert isinstance(refusal, Unavailable)
        assert served.statistics().described["in_flight"] == 2
        assert served.statistics().failed.count == 1
        gate.set()
        await asyncio.gather(running, queued)
        await served.drain()
        served.close()

    asyncio.run(work())


@pytest.mark.parametrize("ending", ["an answer", "a client that leaves", "a failure"])
async def test_all_bytes_of_a_large_request_count_while_it_waits_and_none_after(ending: str) -> None:
    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if ending == "a failure":
            raise RuntimeError
        return {"y": inputs["x"]}

    gate = threading.Event()
    engine = FunctionEngine(run, gate=gate)
    served = loaded(engine, limits=Limits(max_batch=1, max_queue_bytes=1000))
    assert served._dispatcher is not None
    queue = served._dispatcher._scheduler._queue
    first = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    large = asyncio.create_task(served.infer({"x": np.ones((100, 2), np.float32)}))
    await wait_until(lambda: queue.count)
    assert queue.nbytes == 800
    with pytest.raises(Unavailable, match="the queue is full"):
        await served.infer({"x": np.ones((30, 2), np.float32)})
    if ending == "a client that leaves":
        large.cancel()
        await asyncio.wait([large])
        assert queue.nbytes == 0
    gate.set()
    await asyncio.wait([first, large])
    assert (queue.nbytes, queue.count) == (0, 0)
    await served.drain()
    served.close()


async def test_all_text_of_a_large_request_counts_while_it_waits_and_none_after() -> None:
    gate = threading.Event()
    signature = Signature(
        (TensorSpec("x", DType.BYTES, ("batch", 1)),), (TensorSpec("y", DType.BYTES, ("batch", 1)),), "batch"
    )
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"]}, signature, gate)
    served = loaded(engine, limits=Limits(max_batch=1, max_queue_bytes=10_000))
    assert served._dispatcher is not None
    queue = served._dispatcher._scheduler._queue
    first = asyncio.create_task(served.infer({"x": np.array([[b"a"]], object)}))
    await wait_until(lambda: engine.calls)
    large = asyncio.create_task(served.infer({"x": np.array([[b"a" * 92]] * 80, object)}))
    await wait_until(lambda: queue.count)
    assert queue.nbytes == 80 * 100
    with pytest.raises(Unavailable, match="the queue is full"):
        await served.infer({"x": np.array([[b"a" * 92]] * 30, object)})
    assert queue.nbytes == 80 * 100
    gate.set()
    await first
    assert (await large)["y"].shape == (80, 1)
    assert (queue.nbytes, queue.count) == (0, 0)
    await served.drain()
    served.close()


async def test_a_request_of_which_the_first_parts_alone_are_taken_in_leaves_no_trace() -> None:
    gate = threading.Event()
    engine = FunctionEngine(gate=gate)
    served = loaded(engine, limits=Limits(max_batch=4, max_queue_bytes=60))
    first = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: engine.calls)
    second = asyncio.create_task(served.infer(ONE))
    await wait_until(lambda: served.statistics().described["waiting"])
    with pytest.raises(Unavailable, match="the queue is full"):
        await served.infer({"x": np.ones((8, 2), np.float32)})  # of two parts of 32 bytes
    told = served.statistics().described
    assert (told["waiting"], told["in_flight"]) == (1, 2)
    gate.set()
    assert [len((await answer)["y"]) for answer in (first, second)] == [1, 1]
    await served.drain()
    served.close()


def test_an_slo_that_the_model_cannot_keep_is_reported_on_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    takes({1: 0.1}, monkeypatch)
    loaded(FunctionEngine(), slo=0.2).close()
    assert not caplog.text
    loaded(FunctionEngine(), slo=0.1).close()
    assert "one sample takes 100.00 ms, too long for the slo of 100ms" in caplog.text


def test_batches_are_shared_by_devices() -> None:
    gate = threading.Event()
    engines = [FunctionEngine(gate=gate) for _ in range(4)]
    for engine, device in zip(engines, ("gpu:0", "gpu:0", "gpu:1", "gpu:1"), strict=True):
        engine.device = device

    async def work() -> None:
        scheduler = Scheduler(Limits(max_batch=1), batching=True, engines=4)
        dispatcher = Dispatcher("m", "1", engines, DOUBLER, scheduler)
        answers: list[Outcome] = []
        for number in (2, 4):
            while dispatcher.in_flight < number:
                dispatcher.submit(Request(ONE, answers.append))
            while sum(len(engine.calls) for engine in engines) < number:
                await asyncio.sleep(0.001)
            assert [sum(map(len, (one.calls, two.calls))) for one, two in (engines[:2], engines[2:])] == [
                number / 2
            ] * 2
        gate.set()
        await dispatcher.wait_quiet()
        assert len(answers) == 4
        dispatcher.close()

    asyncio.run(work())
