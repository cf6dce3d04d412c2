"""Running a batch: join the requests, call the engine once, and return each request its own samples.

The scheduler has chosen the requests before, see :meth:`ingot.runtime.scheduling.scheduler.Scheduler.take`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from ingot.errors import EngineLost, EngineTimeout, IngotError, InternalError, SamplesFailed, TooLarge, Unavailable
from ingot.faults import rate_limited_logger
from ingot.report import units
from ingot.runtime.dispatch.output_check import OutputCheck
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.dispatch.suspects import Suspects
from ingot.runtime.engines.engine import Engine
from ingot.runtime.gpu.array import Range, TargetedInputs
from ingot.runtime.scheduling.entry import Entry, Outcome, size_of
from ingot.tensors import Array, DType, Signature, TensorSpec
from ingot.tensors.padding import Padder

log = rate_limited_logger(__name__)

# Kinds of numpy types whose arrays can be joined as bytes, in a third of the time of np.concatenate.
_PLAIN: Final = "biuf"
# Smaller arrays are cheap to allocate: malloc keeps their memory and requests no fresh pages from the kernel.
_LARGE: Final = 1 << 20
# Bytes of outputs that no engine makes in a second: shorter calls are not measured against the limit of answers.
_FASTEST: Final = 1e12
# Most bytes that one engine's buffers hold together; larger batches are allocated separately.
LIMIT = 64 << 20


@dataclass(frozen=True)
class AnswerLimit:
    """The most bytes of one answer's outputs, and the name of the model, for messages."""

    nbytes: float = math.inf
    model: str = ""

    def checked(self, outputs: Mapping[str, Array], before: int = 0) -> Outcome:
        """Return the outputs, or the error if they are too large; ``before`` bytes were counted for the request."""
        sizes = {name: size_of(array) for name, array in outputs.items()}
        nbytes = before + sum(sizes.values())
        if nbytes <= self.nbytes:
            return outputs
        largest = max(sizes, key=sizes.__getitem__)
        return TooLarge(
            f"the outputs of model '{self.model}' have {units.size(nbytes)} for this request, most of it in "
            f"'{largest}', over the limit of {units.size(int(self.nbytes))}; send a request with a smaller answer, or "
            "raise --max-answer-mb (INGOT_MAX_ANSWER_MB)"
        )


class BatchTimings:
    """Cost of one batch: seconds by stage, engine calls, and input elements before and after padding.

    ``models`` are the calls of the model's code to others: the name of each, and when it began and ended; ``open`` are
    what cancels those that wait.
    ``unfit`` is the number of samples of the smallest call for several requests for which there was too little memory.
    """

    __slots__ = ("calls", "elements", "joining", "models", "open", "padded", "running", "splitting", "unfit")

    def __init__(self) -> None:
        self.joining = self.running = self.splitting = 0.0
        self.calls = 0
        self.elements = self.padded = 0
        self.unfit = 0
        self.models: tuple[tuple[str, float, float], ...] = ()
        self.open: dict[int, Callable[[], None]] = {}


class Batch(NamedTuple):
    """The requests of a batch that runs in an engine process, and its timings."""

    entries: Sequence[Entry]
    timings: BatchTimings


BATCH: ContextVar[Batch | None] = ContextVar("batch", default=None)
"""The batch that the current worker thread runs in an engine process."""


class Buffers:
    """One reusable buffer per input, grown to the largest batch so far, for an engine that runs one batch at a time.

    Args:
        engine: allocates the buffers. For one on a GPU that allocates its own memory, all inputs come from there: it
            is pinned, and the GPU reads it without a copy.
        limit: most bytes of all buffers together.
    """

    def __init__(self, engine: Engine, limit: int = LIMIT):
        self._allocate = engine.allocate
        self._always = engine.capabilities.allocates and engine.device != "cpu"
        self._limit = limit
        self._kept: dict[str, Array] = {}
        self.nbytes = 0  # bytes held between batches

    def wants(self, nbytes: int) -> bool:
        """Return whether an array of ``nbytes`` bytes should come from here rather than from numpy."""
        return self._always or nbytes >= _LARGE

    def take(self, spec: TensorSpec, shape: Sequence[int]) -> Array:
        """Return an uninitialized array for the next batch. It reuses the memory of the previous one."""
        count = math.prod(shape)
        kept = self._kept.get(spec.name)
        if kept is not None and kept.size >= count:
            return kept[:count].reshape(shape)
        del kept  # free it before allocating more
        self._drop(spec.name)
        made = self._allocate(spec, (count,))
        if self.nbytes + made.nbytes <= self._limit:
            self._kept[spec.name] = made
            self.nbytes += made.nbytes
        return made.reshape(shape)

    def _drop(self, name: str) -> None:
        dropped = self._kept.pop(name, None)
        if dropped is not None:
            self.nbytes -= dropped.nbytes

    def part_from(self, outputs: Iterable[Array]) -> None:
        """Release buffers that an engine returned as outputs, since readers keep those beyond the batch."""
        for output in outputs:
            for name, buffer in list(self._kept.items()):
                if np.may_share_memory(output, buffer):
                    self._drop(name)


class BatchRunner:
    """Runs batches on one engine, one at a time.

    Args:
        engine: the loaded model.
        signature: the model's signature.
        padding: for a model whose requests may be padded to one size.
        limit: of each request's outputs.
        suspects: for an engine whose process may end; shared with the model's other engines.

    Attributes:
        spent: timings of the last batch.
        ended: the error of an engine call of that batch that was ended; the calls that remained were not made.
    """

    def __init__(
        self,
        engine: Engine,
        signature: Signature,
        padding: PaddingPolicy | None = None,
        limit: AnswerLimit = AnswerLimit(),
        suspects: Suspects | None = None,
    ):
        self._suspects = suspects
        self.spent = BatchTimings()
        self.ended: EngineTimeout | None = None
        self._engine = engine
        self._padding = padding
        self._limit = limit
        self._soonest = limit.nbytes / _FASTEST
        self._texts = any(spec.dtype is DType.BYTES for spec in signature.outputs)
        self._buffers = Buffers(engine)
        self._delivers = bool(engine.direct.outputs)
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._input_axes = signature.batch_axes(signature.inputs)
        self._batched = next(iter(self._input_axes), "")
        self._outputs = OutputCheck(signature)
        self._output_axes = signature.batch_axes(signature.outputs)

    def run(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Run entries as one batch and return one outcome each, in order.

        If a joined batch fails, its halves run separately, and so on, so that only the faulty request fails. A batch
        that was running when its engine process ended fails as a whole, and so does one whose call was ended.
        """
        self.spent = BatchTimings()
        self.ended = None
        if self._suspects is not None:
            BATCH.set(Batch(entries, self.spent))
        parts = [entries] if self._padding is None else self._padding.parts(entries)
        if len(parts) == 1 and not self._suspects:
            return self._run(entries)
        found: dict[Entry, Outcome] = {}
        if self._suspects:
            parts, found = self._suspects.divide(parts)
        for part in parts:
            # A part that ran before may have shown that this one is to be refused.
            now, refused = self._suspects.divide([part]) if self._suspects and len(part) == 1 else ([part], {})
            found.update(refused)
            for running in now:
                outcomes = self._stay(running)
                found.update(zip(running, outcomes, strict=True))
                if self._suspects:
                    self._suspects.settle(running, outcomes)
        return [found[entry] for entry in entries]

    def _run(self, entries: Sequence[Entry]) -> list[Outcome]:
        try:
            return self._call(entries)
        except EngineLost as error:  # each half could end the next process, too
            if self._suspects is not None:
                self._suspects.add(entries)
            return [error for _ in entries]
        except EngineTimeout as error:  # each half could take as long again
            self.ended = error
            return [error] * len(entries)
        except IngotError as error:
            if len(entries) == 1:
                return [error]
            if isinstance(error, TooLarge):
                self._note_unfit(entries)
        except MemoryError as error:
            if len(entries) == 1:
                return [TooLarge(f"the request needs more memory than there is: {error}")]
            self._note_unfit(entries)
        except Exception:  # an engine's unforeseen failure must reach its requests and not end the thread
            log.exception("the engine failed on a batch of %d requests", len(entries))
            if len(entries) == 1:
                return [InternalError("the engine failed on this input")]
        middle = len(entries) // 2
        return [*self._stay(entries[:middle]), *self._stay(entries[middle:])]

    def _note_unfit(self, entries: Sequence[Entry]) -> None:
        samples = sum(entry.samples for entry in entries)
        self.spent.unfit = min(self.spent.unfit or samples, samples)

    def _stay(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Run a part of a batch without entries that were cancelled meanwhile, unless the batch was ended."""
        if self.ended is not None:
            return [self.ended] * len(entries)
        staying = [entry for entry in entries if not entry.done]
        outcomes = dict(zip(staying, self._run(staying), strict=True)) if staying else {}
        return [outcomes.get(entry) or Unavailable("the client left") for entry in entries]

    def _call(self, entries: Sequence[Entry]) -> list[Outcome]:
        spent = self.spent
        began = time.perf_counter()
        padding = self._padding
        inputs = self._join(entries) if padding is None else self._pad(padding, entries)
        joined = time.perf_counter()
        spent.joining += joined - began
        spent.calls += 1
        failed: SamplesFailed | None = None
        try:
            targets = self._targets(entries) if self._delivers else None
            outputs = self._engine.deliver(inputs, targets) if targets else self._engine.run(inputs)
        except SamplesFailed as error:
            failed, outputs = error, {**error.outputs}
        finally:
            ran = time.perf_counter()
            spent.running += ran - joined
        outputs = self._outputs.checked(outputs, self._samples(entries))
        if self._buffers.nbytes:
            self._buffers.part_from(outputs.values())
        answers = self._split(entries, outputs)
        if padding is not None:
            answers = [padding.padder.cut(entry.inputs, answer) for entry, answer in zip(entries, answers, strict=True)]
        spent.splitting += time.perf_counter() - ran
        limit = self._limit
        if self._texts or (ran - joined > self._soonest and sum([a.nbytes for a in outputs.values()]) > limit.nbytes):
            outcomes = [limit.checked(answer) for answer in answers]
        else:
            outcomes = [*answers]
        return outcomes if failed is None else self._with_failed(entries, outcomes, failed)

    @staticmethod
    def _with_failed(entries: Sequence[Entry], outcomes: list[Outcome], failed: SamplesFailed) -> list[Outcome]:
        """Return the outcomes, with the errors of the entries that have a sample that failed."""
        stops = accumulate(entry.samples for entry in entries)
        found = zip(entries, outcomes, stops, strict=True)
        return [failed.within(stop - entry.samples, stop) or outcome for entry, outcome, stop in found]

    def _samples(self, entries: Sequence[Entry]) -> int:
        if len(entries) > 1:
            return sum([entry.samples for entry in entries])
        # The samples of an empty request count as one in the scheduler.
        name = self._batched
        return entries[0].inputs[name].shape[self._input_axes[name]] if name else 1

    def _targets(self, entries: Sequence[Entry]) -> dict[str, list[Range]]:
        """Return where requests want their samples of outputs on the device, by the name of the output."""
        found: dict[str, list[Range]] = {}
        start = 0
        for entry in entries:
            stop = start + entry.samples
            if isinstance(entry.inputs, TargetedInputs):
                for name, target in entry.inputs.targets.items():
                    samples = Range(start, None if len(entries) == 1 else stop, target)
                    found.setdefault(name, []).append(samples)
            start = stop
        return found

    def _join(self, entries: Sequence[Entry]) -> dict[str, Array]:
        first = entries[0].inputs
        if len(entries) == 1:
            return dict(first)
        axes = self._input_axes
        return {
            name: self._joined(name, [entry.inputs[name] for entry in entries], axes[name]) if name in axes else array
            for name, array in first.items()
        }

    def _joined(self, name: str, arrays: list[Array], axis: int) -> Array:
        first = arrays[0]
        samples = sum([array.shape[axis] for array in arrays])
        shape = (*first.shape[:axis], samples, *first.shape[axis + 1 :])
        if first.dtype != object and self._buffers.wants(math.prod(shape) * first.itemsize):
            return np.concatenate(arrays, axis, out=self._buffers.take(self._specs[name], shape))
        if axis == 0 and first.dtype.kind in _PLAIN:
            try:
                return np.frombuffer(b"".join(arrays), first.dtype).reshape(shape)  # type: ignore[arg-type]
            except TypeError:  # one is not contiguous; checking each takes longer than joining them
                return np.concatenate(arrays)
        return np.concatenate(arrays, axis)

    def _pad(self, padding: PaddingPolicy, entries: Sequence[Entry]) -> dict[str, Array]:
        """Join inputs of different sizes by padding them."""
        padder, target = padding.padder, padding.target(entries)
        real = sum(round((1 - entry.filled) * padder.elements(entry.inputs)) for entry in entries)
        if all(padder.sizes(entry.inputs) == target for entry in entries):
            inputs = self._join(entries)
        elif len(entries) == 1:
            inputs = padder.pad(entries[0].inputs, target)
        else:
            inputs = {name: self._padded(padder, name, entries, target) for name in entries[0].inputs}
        self.spent.elements += real
        self.spent.padded += padder.elements(inputs)
        return inputs

    def _padded(self, padder: Padder, name: str, entries: Sequence[Entry], target: Sequence[int]) -> Array:
        arrays = [entry.inputs[name] for entry in entries]
        axis = self._input_axes.get(name)
        if axis is None:  # equal for all entries
            return padder.pad({name: arrays[0]}, target)[name]
        shape = list(padder.shape(name, arrays[0].shape, target))
        if all(list(padder.shape(name, array.shape, target)) == list(array.shape) for array in arrays):
            return self._joined(name, arrays, axis)
        shape[axis] = sum(entry.samples for entry in entries)
        dtype = self._specs[name].dtype.numpy
        large = self._buffers.wants(math.prod(shape) * dtype.itemsize)
        joined = self._buffers.take(self._specs[name], shape) if large else np.empty(shape, dtype)
        start = 0
        for entry, array in zip(entries, arrays, strict=True):
            padder.put(name, array, joined[_at(axis, start, start + entry.samples)])
            start += entry.samples
        return joined

    def _split(self, entries: Sequence[Entry], outputs: dict[str, Array]) -> list[dict[str, Array]]:
        if len(entries) == 1:
            return [outputs]
        axes = self._output_axes
        parts: list[dict[str, Array]] = []
        first = not any(axes.values())
        start = 0
        for entry in entries:
            stop = start + entry.samples
            part = {}
            for name, array in outputs.items():  # the first case is common and three times as fast
                part[name] = array[start:stop] if first else array[_at(axes[name], start, stop)]
            parts.append(part)
            start = stop
        return parts


def _at(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(start, stop),)


def samples_of(signature: Signature, inputs: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    """Return a range of samples of a request's inputs."""
    axes = signature.batch_axes(signature.inputs)
    return {name: array[_at(axes[name], start, stop)] if name in axes else array for name, array in inputs.items()}
