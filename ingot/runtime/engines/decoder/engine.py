"""A decoder in ONNX Runtime, whose graph reads and extends a cache of keys and values in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import EngineTimeout, InternalError, InvalidArchive, InvalidArgument, Unavailable, Unsupported
from ingot.report import units
from ingot.report.units import size
from ingot.runtime.engines.decoder import sampling
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.decoder.rules import Rules
from ingot.runtime.engines.decoder.sources import Sources
from ingot.runtime.engines.decoder.step import ENCODING_SIGNATURE, SIGNATURE, Chunk, chunks_of, grouped, sources_of
from ingot.runtime.engines.engine import BaseEngine, Capabilities
from ingot.runtime.engines.ort import ort_arena, ort_session
from ingot.runtime.machine import devices, memory
from ingot.tensors import Array

_PAST = "past_key_values"


class DecoderEngine(BaseEngine):
    """Runs steps of a decoder whose attention is GroupQueryAttention, on the CPU; it owns the cache of all rows.

    The graph's inputs and outputs are those of :class:`~ingot.model_store.Generation`.

    Args:
        path: the graph, with its external data in the same folder.
        options: the cache.
        device: ``cpu`` or ``auto``.
        threads: CPU threads per call; by default one per core.
        library: a native library of custom operators.

    Raises:
        InvalidArgument: ONNX Runtime cannot run the file.
        InvalidArchive: the graph is not what the archive declares.
        Unsupported: the device is a GPU.
        Unavailable: there is too little memory for the cache.
    """

    platform = "onnxruntime_onnx"
    device = "cpu"
    signature = SIGNATURE

    def __init__(
        self,
        path: Path,
        options: DecoderOptions,
        *,
        device: str = "auto",
        threads: int | None = None,
        library: Path | None = None,
    ):
        if devices.kind_of(device) not in ("auto", "cpu"):
            raise Unsupported(f"a decoder cannot run on '{device}': models that generate run on the CPU (--device cpu)")
        ort = ort_session.package()
        chosen = ort_session.options_of(ort, path, library)
        chosen.intra_op_num_threads = self._threads = threads or devices.cpu_count()
        ort_arena.use(chosen)
        self._ort, self._errors, self._options = ort, ort_session.errors_of(ort), options
        self._session = self._load(path, chosen)
        self._rules = Rules(options["rules"], len(options["start"]))
        self._run_options, self._terminated = ort.RunOptions(), False
        self._check(path.name)
        self._allocate(options)
        self._sources: Sources | None = None
        if options["encoder"]:
            self._sources = Sources(self._load(path.with_name(options["encoder"]), chosen), options)
            self.signature = ENCODING_SIGNATURE

    def _load(self, path: Path, chosen: Any) -> Any:
        try:
            return ort_session.create(self._ort, path, chosen, ["CPUExecutionProvider"])
        except self._errors as error:
            raise InvalidArgument(f"ONNX Runtime cannot load {path.name}: {ort_session.reason_of(error)}") from error

    def _check(self, file: str) -> None:
        """Check that the graph has the layers, heads and tokens that the archive declares.

        Raises:
            InvalidArchive: it has others.
        """
        options = self._options
        found = {each.name: each.shape for each in (*self._session.get_inputs(), *self._session.get_outputs())}
        heads = [None, options["kv_heads"], None, options["head_size"]]
        declared = {
            f"{_PAST}.{layer}.{part}": heads for layer in range(options["layers"]) for part in ("key", "value")
        } | {"logits": [None, options["vocab"]]}
        more = sum(name.startswith(f"{_PAST}.") for name in found) - 2 * options["layers"]
        for name, sizes in declared.items():
            shape = found.get(name, [])
            if len(shape) != len(sizes) or any(size not in (None, own) for size, own in zip(sizes, shape, strict=True)):
                raise InvalidArchive(
                    f"{file} has {f'the tensor {name} {shape}' if shape else f'no tensor {name}'}, and 'generation' of "
                    f"serving.json declares it with the sizes {['any' if size is None else size for size in sizes]}"
                )
        if more > 0:
            raise InvalidArchive(
                f"{file} has {units.counted(more // 2, 'layer')} more than 'generation' of serving.json declares"
            )

    def _allocate(self, options: DecoderOptions) -> None:
        """Allocate the cache, and the arrays that the graph reads and writes in each call.

        Raises:
            Unavailable: there is too little memory.
        """
        slots, context = options["slots"], options["context"]
        needed, left = options["nbytes"], memory.available()
        if needed > left:
            raise Unavailable(
                f"the cache of {slots} slots of {context} tokens takes {size(needed)}, and {size(int(left))} of memory "
                "are left; lower --slots or --context"
            )
        shape = slots, options["kv_heads"], context, options["head_size"]
        names = [f"{layer}.{part}" for layer in range(options["layers"]) for part in ("key", "value")]
        self._cache = {name: np.zeros(shape, np.float32) for name in names}
        self._history = np.zeros((slots, context), np.int32)
        self._logits = np.zeros((slots, options["vocab"]), np.float32)
        # Of the rows that are extended: token, position, length.
        self._inputs: dict[str, Array] = {
            "input_ids": np.zeros((slots, 1), np.int64),
            "position_ids": np.zeros((slots, 1), np.int64),
            "lengths": np.zeros(slots, np.int32),
            "total": np.zeros(1, np.int32),
        }
        self._bound: dict[tuple[int, int], Any] = {}

    @property
    def settings(self) -> Mapping[str, str]:
        options = self._options
        return {
            "threads": str(self._threads),
            "slots": str(options["slots"]),
            "context": str(options["context"]),
            "cache": size(options["nbytes"]),
        }

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(accepts_zeros=False)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step; see :class:`~ingot.runtime.engines.decoder.step.Step`."""
        if self._terminated:
            self._terminated, self._run_options = False, self._ort.RunOptions()
        for move in inputs["moves"].tolist():
            self._move(*move)
        rows, chunks = len(inputs["tokens"]), chunks_of(inputs)
        began = time.perf_counter()
        if self._sources is not None:
            for source in sources_of(inputs):
                self._sources.encode(source.row, source.tokens, self._encode)
        # Of an encoder-decoder, several tokens attend to one source in a call.
        parts = None if self._sources is None else [[part] for chunk in chunks for part in self._sources.parts(chunk)]
        for group in grouped(chunks) if parts is None else parts:
            self._read(group)
        read = time.perf_counter()
        if rows:
            self.extend(inputs["tokens"], inputs["lengths"])
        extended = time.perf_counter()
        held = [*enumerate(inputs["lengths"] + 1)] if rows else [(chunk.row, chunk.end) for chunk in chunks]

        def history(place: int) -> tuple[Array, int]:
            row, length = held[place]
            return self._history[row, :length], int(inputs["drawn"][place, 1])

        rules = self._rules if self._rules.any else None
        chosen = sampling.choose(self._logits[: len(inputs["knobs"])], inputs, history, rules)
        seconds = np.array([read - began, extended - read, time.perf_counter() - extended])
        return {**chosen, "seconds": seconds}

    def _move(self, source: int, target: int, count: int) -> None:
        for buffer in self._cache.values():
            buffer[target, :, :count] = buffer[source, :, :count]
        self._history[target, :count] = self._history[source, :count]
        if self._sources is not None:
            self._sources.move(source, target)

    def _encode(self, session: Any, given: Mapping[str, Array]) -> list[Array]:
        found: list[Array] = self._reported(lambda options: session.run(None, given, options))
        return found

    def _read(self, group: Sequence[Chunk]) -> None:
        """Read a part of a prompt, or the beginnings of several, padded on the right, into their rows.

        What padding writes into the cache is behind a row's length, and is replaced before it is read.
        """
        first, rows, end = group[0].row, len(group), max(chunk.end for chunk in group)
        start = group[0].start
        ids = np.zeros((rows, end - start), np.int64)
        for own, chunk in zip(ids, group, strict=True):
            self._history[chunk.row, start : chunk.end] = own[: chunk.tokens.size] = chunk.tokens
        io = self._bound.get((first, -rows)) or self._bind(first, -rows)
        given = {
            "input_ids": ids,
            "position_ids": np.tile(np.arange(start, end, dtype=np.int64), (rows, 1)),
            "lengths": np.array([chunk.end - 1 for chunk in group], np.int32),
            "total": np.array([end], np.int32),
        }
        for name, array in given.items():
            io.bind_cpu_input(name, array)
        _bind_output(io, "logits", self._logits[:rows])
        self._call(io, first, rows)

    def extend(self, tokens: Array, lengths: Array) -> Array:
        """Extend each of the first rows by a token.

        Args:
            tokens: INT64[rows].
            lengths: INT64[rows], the tokens that each holds before.

        Returns:
            The logits of the next token, FP32[rows, vocab], until the next call.
        """
        rows, given = len(tokens), self._inputs
        given["input_ids"][:rows, 0] = tokens
        given["position_ids"][:rows, 0] = given["lengths"][:rows] = lengths
        given["total"][0] = lengths.max() + 1
        self._history[np.arange(rows), lengths] = tokens
        self._call(self._bound.get((0, rows)) or self._bind(0, rows), 0, rows)
        return self._logits[:rows]

    def _bind(self, first: int, rows: int) -> Any:
        """Return a binding to rows of the cache: to extend the first ones, with all that they read, or (-n) to read."""
        count, io = abs(rows), self._session.io_binding()
        if rows >= -1:  # groups of prompts are rarely the same again
            self._bound[first, rows] = io
        for name, buffer in self._cache.items():
            part = buffer[first : first + count]
            _bind_input(io, f"past_key_values.{name}", part)
            _bind_output(io, f"present.{name}", part)
        if self._sources is not None:
            self._sources.bind(io, first, count, _bind_input)
        if rows > 0:
            for name, array in self._inputs.items():
                _bind_input(io, name, array if name == "total" else array[:rows])
            _bind_output(io, "logits", self._logits[:rows])
        return io

    def _call(self, io: Any, first: int, rows: int) -> None:
        if self._sources is not None:
            self._sources.prepare(first, rows)
        self._reported(lambda options: self._session.run_with_iobinding(io, options))

    def _reported(self, call: Callable[[Any], Any]) -> Any:
        options = self._run_options
        try:
            return call(options)
        except self._errors as error:
            if options.terminate:
                raise EngineTimeout("the engine call was ended") from error
            raise InternalError(f"a step of the decoder failed: {ort_session.reason_of(error)}") from error

    def terminate(self) -> None:
        """End the running call between two operators."""
        options = self._run_options
        self._terminated = True
        options.terminate = True

    def close(self) -> None:
        """Free the model and its cache."""
        self._bound, self._cache, self._sources = {}, {}, None
        del self._session


def _bind_input(io: Any, name: str, array: Array) -> None:
    io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(io: Any, name: str, array: Array) -> None:
    io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
