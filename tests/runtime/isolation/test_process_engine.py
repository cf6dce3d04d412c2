"""Engines in separate processes: the same answers, and an end that costs only the call that was running."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import DeadlineExceeded, EngineLost, EngineTimeout, InvalidArgument, TooLarge, Unavailable
from ingot.model_store import Archive
from ingot.runtime import BatchRunner, EngineSpec, Entry, LoadSpec, Settings, load_engine
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.ipc import arena
from ingot.runtime.engines.isolation import supervisor
from ingot.runtime.engines.isolation.description import Description
from ingot.runtime.engines.isolation.engine import Isolation, ProcessEngine
from ingot.runtime.engines.isolation.process import EngineProcess
from ingot.runtime.engines.isolation.supervisor import Run, Supervision
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.runtime import variants
from tests.server.outside import wait_until
from tests.support import ROOT

pytestmark = pytest.mark.one_case  # of each test; the others by `make test-matrix`

LEAST = np.iinfo(np.int64).min
DEADLY = {"x": np.array([[LEAST, 1]]), "d": np.array([[-1, 1]])}
HARMLESS = {"x": np.array([[6, 1]]), "d": np.array([[3, 1]])}


@contextlib.contextmanager
def opened(path: Path, **limits: Any) -> Iterator[ProcessEngine]:
    engine = load_engine(EngineSpec(path, device="cpu", threads=1), Isolation(why="a test", **limits))
    assert isinstance(engine, ProcessEngine)
    with contextlib.closing(engine):
        yield engine


def pid_of(engine: ProcessEngine) -> int:
    process = engine._supervisor._ready
    assert process is not None
    return process._process.pid


class Supervised:
    """Supervises an engine, and keeps what is reported."""

    def __init__(self, engine: ProcessEngine, test: Any = lambda run: None):
        self.lost: list[str] = []
        self.tests = 0
        self._test = test
        engine.supervise(Supervision("m", self._tested, self.lost.append, lambda: None))

    def _tested(self, run: Run) -> None:
        self.tests += 1
        self._test(run)


@pytest.mark.matrix
def test_it_describes_itself_and_answers_as_in_this_process(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    inside = load_engine(EngineSpec(path, device="cpu", threads=1))
    with opened(path) as engine:
        assert (engine.signature, engine.platform, engine.device) == (inside.signature, inside.platform, inside.device)
        assert engine.settings == {**inside.settings, "memory_arena": "shared", "process": "own"}
        for samples in (1, 7, 100_000):  # in the socket, and in shared memory
            x = np.random.default_rng(0).standard_normal((samples, 3), np.float32)
            expected, found = inside.run({"x": x}), engine.run({"x": x})
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.matrix
def test_text_and_empty_tensors_pass(tmp_path: Path) -> None:
    kept = onnx_models.identity(tmp_path, DType.BYTES)
    with opened(kept) as engine:
        (spec,) = engine.signature.inputs
        for items in ([b"caf\xc3\xa9", b""], []):
            array = np.array([items, items], object).T
            (found,) = engine.run({spec.name: array}).values()
            assert found.tolist() == array.tolist()


@pytest.mark.matrix
def test_errors_of_the_engine_keep_their_class(tmp_path: Path) -> None:
    with opened(onnx_models.quotient(tmp_path)) as engine:
        with pytest.raises(InvalidArgument, match="division by zero"):
            engine.run({"x": HARMLESS["x"], "d": np.zeros((1, 2), np.int64)})
        assert engine.run(HARMLESS)["y"].tolist() == [[2, 1]]


@pytest.mark.matrix
def test_a_file_that_is_not_a_model_is_refused_as_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(b"junk")
    with pytest.raises(InvalidArgument, match=r"ONNX Runtime cannot load junk\.onnx"):
        load_engine(EngineSpec(path), Isolation(why="a test"))


@pytest.mark.matrix
def test_a_batch_joined_in_shared_memory_is_not_copied_and_outputs_are_released(tmp_path: Path) -> None:
    with opened(onnx_models.affine(tmp_path)) as engine:
        (inputs,) = engine._supervisor.inputs
        x = engine.allocate(engine.signature.inputs[0], (100_000, 3))
        x[:] = 1
        assert inputs.offset_of(x) is not None
        assert len(inputs._taken) == 1
        kept = engine.run({"x": x})["y"][7:8]
        assert len(inputs._taken) == 1
        del x
        process = engine._supervisor._ready
        assert process is not None
        gc.collect()
        assert len(process._channels[0].freed) == 1  # the other output
        for _ in range(6):  # more than fits without releasing
            engine.run({"x": np.ones((10_000_000, 3), np.float32)})
        assert not inputs._taken
        assert kept.tolist() == [[3, 3, 3]]


def test_an_end_costs_only_the_call_that_was_running(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(onnx_models.quotient(tmp_path)) as engine:
        supervised = Supervised(engine)
        with pytest.raises(EngineLost) as lost:
            engine.run(DEADLY)
        assert str(lost.value) == (
            "the engine process of model 'm' ended by SIGFPE; the request may have caused it. It is being restarted"
        )
        assert engine.run(HARMLESS)["y"].tolist() == [[2, 1]]  # waits for the next process
        assert supervised.lost == ["ended by SIGFPE"]
        assert supervised.tests == 1
        assert engine.down == ""
    assert "the engine process of model 'm' runs again" in caplog.text


@pytest.mark.matrix
def test_a_killed_process_is_replaced_though_nobody_calls(tmp_path: Path) -> None:
    with opened(onnx_models.affine(tmp_path)) as engine:
        supervised = Supervised(engine)
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_until(lambda: supervised.tests == 1 and not engine.down)
        assert supervised.lost == ["ended by SIGKILL, perhaps as the system ran out of memory"]
        assert engine.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]


@pytest.mark.matrix
def test_a_process_that_fails_its_test_does_not_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([True, True])

    def twice_wrong(run: Run) -> None:
        if next(failures, False):
            raise InvalidArgument("other numbers")

    with opened(onnx_models.quotient(tmp_path)) as engine:
        supervised = Supervised(engine, twice_wrong)
        with pytest.raises(EngineLost):
            engine.run(DEADLY)
        assert engine.run(HARMLESS)["y"].tolist() == [[2, 1]]
        assert supervised.tests == 3
    assert caplog.text.count("cannot be started again: other numbers") == 2


@pytest.mark.matrix
def test_a_process_that_lost_the_gpu_does_not_serve_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places, opening = iter(["cuda:0", "cpu", "cuda:1"]), EngineProcess.open

    def open_on_a_gpu(process: EngineProcess, timeout: float | None) -> Description:
        return opening(process, timeout).model_copy(update={"device": next(places)})

    monkeypatch.setattr(EngineProcess, "open", open_on_a_gpu)
    with opened(onnx_models.quotient(tmp_path)) as engine:
        Supervised(engine)
        with pytest.raises(EngineLost):
            engine.run(DEADLY)
        assert engine.run(HARMLESS)["y"].tolist() == [[2, 1]]
        assert next(places, None) is None
    assert "cannot be started again: it would run on the CPU, since it cannot use cuda:0 any more" in caplog.text


@pytest.mark.matrix
def test_a_crash_loop_fails_at_once_what_waits_and_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(supervisor, "_FAILED_WAIT", 3.0)
    with opened(onnx_models.quotient(tmp_path)) as engine:
        Supervised(engine)
        for _ in range(5):
            with pytest.raises(EngineLost, match="the request may have caused it"):
                engine.run(DEADLY)
        wait_until(lambda: engine.failed)
        with pytest.raises(Unavailable, match="the engine process of model 'm' ended by SIGFPE"):
            engine.run(HARMLESS)
        wait_until(lambda: not engine.failed)
        assert engine.run(HARMLESS)["y"].tolist() == [[2, 1]]
    assert "5 times within" in caplog.text


@pytest.mark.matrix
def test_a_call_does_not_wait_beyond_its_limit_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_WAIT", 1000.0)
    with opened(onnx_models.quotient(tmp_path)) as engine:
        engine._supervisor._wait = 1000.0
        Supervised(engine)
        with pytest.raises(EngineLost):
            engine.run(DEADLY)
        with (
            _repeating(engine.kill),  # as the watchdog does from the limit on
            pytest.raises(Unavailable, match="of model 'm' ended by SIGFPE, and no other is ready"),
        ):
            engine.run(HARMLESS)


@pytest.mark.matrix
def test_without_supervision_the_engine_ends_with_its_process(tmp_path: Path) -> None:
    with opened(onnx_models.quotient(tmp_path)) as engine:
        with pytest.raises(EngineLost):
            engine.run(DEADLY)
        with pytest.raises(Unavailable, match="the engine process ended by SIGFPE"):
            engine.run(HARMLESS)
        with pytest.raises(EngineLost, match="the engine process ended by SIGFPE"):
            Supervised(engine)


@pytest.mark.parametrize("endless", [onnx_models.endless_load, onnx_models.endless_run])
@pytest.mark.matrix
def test_loading_has_a_limit(tmp_path: Path, endless: Any) -> None:
    with (
        # On a busy machine, a process that would be ready can reach the limit too.
        pytest.raises((EngineLost, DeadlineExceeded), match="was killed"),
        opened(endless(tmp_path / "odd.onnx"), load_timeout=2) as engine,
    ):
        engine.run({"x": np.ones((1, 3), np.float32)})


@contextlib.contextmanager
def _repeating(call: Callable[[], None]) -> Iterator[None]:
    """Call a function in another thread, ten times a second, until the block ends."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(0.1):
            call()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.matrix
def test_a_call_is_ended_in_the_process_that_runs_it(tmp_path: Path) -> None:
    with opened(onnx_models.counting(tmp_path)) as engine:
        Supervised(engine)
        pid = pid_of(engine)
        with _repeating(engine.terminate), pytest.raises(EngineTimeout):
            engine.run({"n": np.array([2**62])})
        while True:  # a late request to end may meet this call
            with contextlib.suppress(EngineTimeout):
                assert engine.run({"n": np.array([3])})["y"].tolist() == [3]
                break
        assert pid_of(engine) == pid


@pytest.mark.matrix
def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    with opened(onnx_models.counting(tmp_path)) as engine:
        supervised = Supervised(engine)
        os.kill(pid_of(engine), signal.SIGSTOP)
        timer = threading.Timer(0.1, engine.kill)
        timer.start()
        with pytest.raises(EngineTimeout, match="of model 'm' was killed, since a call did not end at its time limit"):
            engine.run({"n": np.array([3])})
        assert engine.run({"n": np.array([3])})["y"].tolist() == [3]
        assert supervised.lost == ["was killed, since a call did not end at its time limit"]


@pytest.mark.matrix
def test_a_process_that_is_stopped_in_its_start_is_replaced(tmp_path: Path) -> None:
    with opened(onnx_models.affine(tmp_path)) as engine:

        def stop_first(run: Run) -> None:
            latest = engine._supervisor._latest
            assert latest is not None
            if supervised.tests == 1:
                os.kill(latest._process.pid, signal.SIGSTOP)
            run({"x": np.ones((1, 3), np.float32)})

        supervised = Supervised(engine, stop_first)
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_until(lambda: supervised.tests == 2)  # not after the limit of a start, a minute
        assert engine.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]


@pytest.mark.matrix
def test_a_limited_address_space_is_shared_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit
    small = (3 << 30, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: small if kind == resource.RLIMIT_AS else limits(kind))
    path = onnx_models.affine(tmp_path)
    with opened(path) as engine:
        assert len(engine._supervisor.inputs[0]._bytes) == 96 << 20
        assert engine.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]

    def no_memory(size: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(arena, "create", no_memory)
    with pytest.raises(Unavailable, match=r"limited to 3072 MiB.*ulimit -v"), opened(path):
        pass


@pytest.mark.matrix
def test_a_model_is_closed_while_a_call_does_not_end(tmp_path: Path) -> None:
    with opened(onnx_models.counting(tmp_path)) as engine:
        Supervised(engine)
        pid = pid_of(engine)
        os.kill(pid, signal.SIGSTOP)  # no engine can be asked to end its call
        runner = BatchRunner(engine, engine.signature)
        done: list[Any] = []
        worker = Worker(engine, runner, lambda _, entries, outcomes, *rest: done.extend(outcomes), "test")
        worker.start([Entry({"n": np.array([3])}, 1, lambda outcome: None, 0.0)])
        wait_until(lambda: worker.running is not None)
        worker.close(0.1)
        wait_until(lambda: bool(done))
        assert isinstance(done[0], EngineLost)
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.matrix
def test_too_much_memory_fails_the_request_alone(tmp_path: Path) -> None:
    with opened(onnx_models.filled(tmp_path), memory_mb=512) as engine:
        pid = pid_of(engine)
        with pytest.raises(TooLarge, match="more memory than its engine process may have, 512 MiB"):
            engine.run({"n": np.array([10**9])})
        assert engine.run({"n": np.array([2])})["y"].tolist() == [1, 1]
        assert pid_of(engine) == pid


@pytest.mark.matrix
def test_no_secret_and_no_file_of_the_server_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = ["INGOT_PURE", "OMP_NUM_THREADS"]
    for name in ("INGOT_KEY_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CUDA_API_KEY", *passed):
        monkeypatch.setenv(name, "value-of-" + name)
    with (tmp_path / "open").open("w") as file, opened(onnx_models.affine(tmp_path)) as engine:
        os.set_inheritable(file.fileno(), True)
        process = Path("/proc", str(pid_of(engine)))
        variables = process.joinpath("environ").read_bytes().split(b"\0")
        found = sorted(item.decode() for item in variables if b"value-of-" in item)
        assert found == [f"{name}=value-of-{name}" for name in passed]
        files = {str(item.readlink()) for item in process.joinpath("fd").iterdir()}
        own = ("/dev/null", "socket:", "pipe:", "anon_inode:", "/memfd:")
        assert [name for name in files if not name.startswith(own)] == []


@pytest.mark.matrix
def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    program = f"""
import time
from pathlib import Path
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.isolation.engine import Isolation
engine = load_engine(EngineSpec(Path({str(path)!r})), Isolation(why="a test"))
print(engine._supervisor._ready._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    wait_until(lambda: _gone(pid))


def _gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


LIES: Mapping[str, str] = {
    "junk": "b'junk' * 100",
    "a huge record": "struct.pack('<IB', 0xffffffff, 4)",
    "an unknown layout": "record(4, struct.pack('<IQ', 7, 0))",
    "a block outside the arena": "record(2, b'\\0' + json.dumps([['y', 'FP32', [1 << 20]]]).encode())"
    " + record(4, struct.pack('<IQ', 0, (1 << 30) - 8))",
    "a negative size": "record(2, b'\\0' + json.dumps([['y', 'FP32', [-4]]]).encode())"
    " + record(4, struct.pack('<IQ', 0, 0))",
    "a layout without content": "record(2, b'')",
    "a layout of other types": "record(2, b'\\0' + json.dumps([[1, 'FP32', 'x']]).encode())",
    "too few bytes": "record(2, b'\\0' + json.dumps([['y', 'FP32', [4]]]).encode())"
    " + record(4, struct.pack('<IQ', 0, (1 << 64) - 1) + b'abc')",
    "nothing, but leaves a process": "b'' if os.fork() == 0 and not os.setsid() else os._exit(3)",
    "a code that does not exist": "record(5, b'\\xff')",
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_process_sends_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """A model's own code may send anything; the server must not crash, or read outside of the shared memory."""
    program = f"""
import json, os, socket, struct, sys
def record(kind, body):
    return struct.pack('<IB', len(body), kind) + body
connection = socket.socket(fileno=int(sys.argv[2]))
connection.recv(1 << 16)
spec = {{"name": "x", "dtype": "FP32", "shape": [1]}}
connection.sendall(record(1, json.dumps({{"signature": {{"inputs": [spec], "outputs": [{{**spec, "name": "y"}}]}},
    "platform": "liar", "device": "cpu", "settings": {{}}, "capabilities": {{}}, "measures": []}}).encode()))
connection.recv(1 << 16)
connection.sendall({LIES[lie]})
connection.recv(1 << 16)
"""
    path = tmp_path / "liar.py"
    path.write_text(program)
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return real([sys.executable, str(path), *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with opened(onnx_models.affine(tmp_path)) as engine:
        assert engine.platform == "liar"
        with pytest.raises(EngineLost, match=r"sent an invalid answer|ended with exit code 3"):
            engine.run({"x": np.ones(1, np.float32)})


def test_text_of_a_process_cannot_forge_lines_of_the_log() -> None:
    from ingot.runtime.engines.isolation.process import _printable

    assert _printable("one\n2026-01-01 ERROR two\x1b[2J\ttab\r") == "one 2026-01-01 ERROR two [2J tab"
    assert len(_printable("x" * 5000)) == 1000


def test_the_size_of_an_arena_cannot_be_changed() -> None:
    from ingot.runtime.engines.ipc import arena

    handle = arena.create(1 << 20)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(handle, size)
    os.close(handle)


@pytest.mark.matrix
def test_arrays_of_an_arena_are_found_in_it() -> None:
    from ingot.runtime.engines.ipc import arena

    handle = arena.create(1 << 20)
    outgoing = arena.Outgoing(handle)
    os.close(handle)
    made = outgoing.allocate((4, 8), np.dtype(np.float32))
    assert made is not None
    assert outgoing.offset_of(made) == 0
    assert outgoing.offset_of(made[2:]) == 64
    assert outgoing.offset_of(made[:, 2:]) is None  # not contiguous
    other: Array = np.ones(4)
    assert outgoing.offset_of(other) is None
    assert outgoing.allocate((1 << 20,), np.dtype(np.float32)) is None
    del made
    gc.collect()
    assert outgoing.take(1 << 20) == 0


@pytest.mark.matrix
def test_it_is_restarted_from_an_archive_file_that_nothing_else_refers_to(tmp_path: Path) -> None:
    variants.archive([variants.Made("fp32")]).save(tmp_path / "m.ingot")

    def spec() -> LoadSpec:
        variant = Archive.open(tmp_path / "m.ingot").unpacked().variant()
        made = LoadSpec.of_variant(variant, Settings(device="cpu", isolate="all"))
        return replace(made, needed=lambda: None)  # which refers to the variant, too

    made = spec()
    gc.collect()
    engine = made.open("cpu", 1)
    assert isinstance(engine, ProcessEngine)
    with contextlib.closing(engine):
        supervised = Supervised(engine)
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_until(lambda: supervised.tests == 1 and not engine.down)
        np.testing.assert_allclose(engine.run({"x": variants.X})["y"], 2 * variants.X)
