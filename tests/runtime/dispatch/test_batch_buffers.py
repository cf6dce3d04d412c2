"""Memory of large batches is reused, bounded, and never changes an earlier answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.runtime import BatchRunner, Capabilities, Entry
from ingot.runtime.dispatch.batch_run import Buffers
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests.runtime.fake_engines import FunctionEngine

X = TensorSpec("x", DType.FP32, ("batch", "size"))
SIGNATURE = Signature((X,), (TensorSpec("y", DType.FP32, ("batch", "size")),), "batch")
LARGE = 1 << 18  # elements: 1 MiB


def batch(*values: float, size: int = LARGE) -> list[Entry]:
    return [Entry({"x": np.full((1, size), value, np.float32)}, 1, lambda outcome: None, 0.0) for value in values]


class Watching(FunctionEngine):
    """Records the address of each call's input."""

    def __init__(self, aliases: bool = False):
        super().__init__(lambda inputs: {"y": inputs["x"] if aliases else inputs["x"] + 1}, SIGNATURE)
        self.places: list[int] = []

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.places.append(inputs["x"].ctypes.data)
        return super().run(inputs)


class Allocating(Watching):
    """An engine on a device with its own memory."""

    device = "cuda"
    capabilities = Capabilities(allocates=True)

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[int, ...]] = []

    def allocate(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        self.allocated.append(tuple(shape))
        return np.empty(shape, spec.dtype.numpy)


def firsts(runner: BatchRunner, entries: Sequence[Entry]) -> list[Array]:
    found = []
    for outcome in runner.run(entries):
        assert isinstance(outcome, Mapping)
        found.append(outcome["y"])
    return found


def test_a_large_batch_reuses_the_last_buffer() -> None:
    engine = Watching()
    runner = BatchRunner(engine, SIGNATURE)
    for values in ((1, 2, 3), (4, 5), (6, 7, 8)):
        assert [answer[0, 0] for answer in firsts(runner, batch(*values))] == [value + 1 for value in values]
    assert len(set(engine.places)) == 1


def test_answers_in_the_buffer_stay_unchanged() -> None:
    runner = BatchRunner(Watching(aliases=True), SIGNATURE)
    given = firsts(runner, batch(1, 2))
    firsts(runner, batch(3, 4))
    firsts(runner, batch(5, 6))
    assert [float(answer.min()) for answer in given] == [float(answer.max()) for answer in given] == [1, 2]


def test_a_single_request_is_not_copied() -> None:
    engine = Watching()
    (entry,) = batch(1)
    firsts(BatchRunner(engine, SIGNATURE), [entry])
    assert engine.places == [entry.inputs["x"].ctypes.data]


def test_an_engine_with_its_own_memory_gets_every_batch_there() -> None:
    engine = Allocating()
    runner = BatchRunner(engine, SIGNATURE)
    for values in ((1, 2), (3, 4), (5, 6, 7)):
        firsts(runner, batch(*values, size=10))
    assert engine.allocated == [(20,), (30,)]


def test_kept_memory_is_bounded() -> None:
    buffers = Buffers(FunctionEngine(), limit=3000)
    other = TensorSpec("z", DType.FP32, ("batch",))
    assert buffers.take(X, (5, 100)).shape == (5, 100)
    assert buffers.nbytes == 2000
    assert buffers.take(other, (400,)).shape == (400,)  # over the bound together: used, and not kept
    assert buffers.nbytes == 2000
    assert buffers.take(X, (800,)).shape == (800,)
    assert buffers.nbytes == 0


def test_text_is_never_put_into_a_buffer() -> None:
    spec = TensorSpec("x", DType.BYTES, ("batch", "size"))
    signature = Signature((spec,), (TensorSpec("y", DType.BYTES, ("batch", "size")),), "batch")
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"]}, signature)
    entries = [Entry({"x": np.full((1, LARGE), value, object)}, 1, lambda outcome: None, 0.0) for value in (b"a", b"b")]
    assert [answer[0, 0] for answer in firsts(BatchRunner(engine, signature), entries)] == [b"a", b"b"]
