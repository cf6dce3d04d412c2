"""Runs a model that is a class in Python."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ingot import foreign
from ingot.errors import IngotError, InvalidArgument, ModelFailed, SamplesFailed
from ingot.runtime.engines.engine import MORE, STREAM, BaseEngine, Capabilities
from ingot.runtime.engines.python import calls, files
from ingot.runtime.engines.python.classes import load_class
from ingot.runtime.engines.python.generators import Ended, Generators
from ingot.runtime.engines.python.interface import interface_of
from ingot.runtime.engines.python.torchserve.handler import HandlerModel
from ingot.runtime.engines.python.torchserve.rows import PLATFORM
from ingot.runtime.engines.python.values import Failures, batch_of, samples_of, tensors_of
from ingot.runtime.machine import devices, nvml
from ingot.tensors import Array, Signature, check_inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """The argument of a model's ``load``.

    Attributes:
        files: the folder of the model's files.
        device: ``cpu``, or a GPU with its index, such as ``cuda:0``.
        settings: values of the server's configuration by name.
    """

    files: Path
    device: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def infer(self, model: str, inputs: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Send a request to another model of the same server, while a batch runs.

        Args:
            model: the name of a model or pipeline, or ``name:version``.
            inputs: arrays or lists by name, with the batch dimension; texts and bytes as lists.
            timeout: seconds until the answer is useless; the batch's own deadline counts too.

        Returns:
            The outputs as arrays by name, those of BYTES as arrays of ``bytes``; in a coroutine an awaitable of them.

        Raises:
            IngotError: the other model's error; NotFound if there is no model of that name.
            InvalidArgument: an input is not an array or list, or the call makes a cycle of models.
            Unavailable: no batch runs, or too many calls of the batch wait.
        """
        return calls.infer(model, inputs, timeout=timeout)


class PythonEngine(BaseEngine):
    """Calls a model's class, in an engine process: its code may do anything.

    Args:
        path: ``model.py:Model``, or the plan of an archive.
        device: as for :class:`~ingot.runtime.engines.spec.EngineSpec`.
        settings: the model's ``context.settings``.
        permissions: the model's permissions; see :mod:`~ingot.permissions`.

    Raises:
        InvalidArgument: the class cannot be served, or its ``load`` fails.
        Unsupported: a package is missing, or has another version than the archive requires.
    """

    platform = "python"

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        settings: Mapping[str, str] | None = None,
        permissions: Sequence[str] = (),
    ):
        self.device = _device(device)
        self.settings: Mapping[str, str] = {}
        model, self._folder = load_class(path, permissions)
        if issubclass(model, HandlerModel):
            self.platform = PLATFORM
        self._interface = interface_of(model)
        self._name = model.__name__
        self._runner = asyncio.Runner()
        self._model = self._loading(model, "__init__")
        if callable(load := getattr(self._model, "load", None)):
            context = Context(self._folder, self.device, settings or {})
            self._loading(lambda: load(context), "load")
        self._call: Callable[[Any], Any] = getattr(self._model, self._interface.method)
        self._generators = Generators(self._begun, self._gathered)
        self._inputs = self._example()

    @property
    def signature(self) -> Signature:
        return self._interface.signature

    @property
    def example(self) -> Mapping[str, Array]:
        return self._inputs

    @property
    def capabilities(self) -> Capabilities:
        reports_health = callable(getattr(self._model, "health", None))
        return Capabilities(accepts_zeros=False, reports_health=reports_health, streams=self._interface.yields)

    @property
    def streams(self) -> int:
        return len(self._generators)

    def end_streams(self, numbers: Sequence[int]) -> bool:
        self._generators.end(numbers)
        return True

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch.

        Raises:
            InvalidArgument: the model raised ValueError.
            ModelFailed: the model raised another exception, or its result does not fit its signature.
            SamplesFailed: the model failed or raised ValueError for some samples only.
            MemoryError: there is no memory; smaller batches may succeed.
        """
        specs, count = self.signature.outputs, len(next(iter(inputs.values())))
        where = f"{self._name}.{self._interface.method}"
        call = self._each if self._interface.by_sample else self._batch
        outputs, failures = tensors_of(specs, call(inputs), count, where)
        if STREAM in inputs:
            over = [at for at, failure in failures.items() if isinstance(failure, Ended)]
            outputs[MORE] = np.array([at not in over for at in range(count)])
            failures = {at: failure for at, failure in failures.items() if at not in over}
        if failures:
            raise self._samples_failed(outputs, failures)
        return outputs

    def health(self) -> str:
        """Return why the model's ``health`` is false or raised; empty otherwise."""
        found = foreign.outcome(lambda: self._awaited(self._model.health()))
        if isinstance(found, Exception):
            return foreign.typed(found)
        return f"{self._name}.health returned False" if found is False else ""

    def terminate(self) -> None:
        """Have no effect: the time limit of a call ends its process."""

    def close(self) -> None:
        """Have no effect: the model ends with its process."""

    def _batch(self, inputs: Mapping[str, Array]) -> Any:
        batch = batch_of(self._interface, inputs)
        return self._result(lambda: self._call(batch))

    def _each(self, inputs: Mapping[str, Array]) -> Sequence[Any]:
        """Return the result or the exception of each sample; coroutines run at the same time."""
        samples = samples_of(self._interface, {name: inputs[name] for name in inputs if name != STREAM})
        if self._interface.yields:
            handles = inputs.get(STREAM)
            return self._generators.first(samples) if handles is None else self._generators.advance(handles, samples)
        return self._gathered([sample if isinstance(sample, Exception) else self._begun(sample) for sample in samples])

    def _gathered(self, found: Sequence[Any]) -> Sequence[Any]:
        return self._runner.run(_gathered(found)) if any(map(inspect.isawaitable, found)) else found

    def _begun(self, sample: Any) -> Any:
        return foreign.outcome(lambda: self._call(sample))

    def _result(self, call: Callable[[], Any]) -> Any:
        """Return the result of the model's code.

        Raises:
            IngotError: the code raised an exception.
            MemoryError: there is no memory.
        """
        found = foreign.outcome(lambda: self._awaited(call()))
        if isinstance(found, Exception):
            raise self._error(found) from found
        return found

    def _samples_failed(self, outputs: Mapping[str, Array], failures: Failures) -> Exception:
        errors: dict[int, IngotError] = {}
        for at, failure in sorted(failures.items()):
            error = self._error(failure)
            if not isinstance(error, IngotError):  # MemoryError: the samples run again in smaller batches
                return error
            errors[at] = error
        return SamplesFailed(outputs, errors)

    def _awaited(self, value: Any) -> Any:
        return self._runner.run(_single(value)) if inspect.isawaitable(value) else value

    def _error(self, error: Exception) -> IngotError | MemoryError:
        """Return the error for clients; the log has the place of a failure."""
        if isinstance(error, IngotError | MemoryError):
            return error
        if isinstance(error, ValueError) and not isinstance(error, foreign.ExitRequested):
            return InvalidArgument(f"the model rejects this input: {foreign.one_line(error)}")
        log.error("%s.%s raised %s", self._name, self._interface.method, files.describe(error, self._folder))
        return ModelFailed(f"the model failed: {foreign.typed(error)}{_hint(error)}")

    def _loading(self, call: Callable[[], Any], method: str) -> Any:
        """Return the result of code that prepares the model.

        Raises:
            InvalidArgument: the code raised an exception.
        """

        def failure(error: Exception) -> str:
            return f"{self._name}.{method} raised {files.describe(error, self._folder)}{_hint(error)}"

        with foreign.reported_as(InvalidArgument, failure, keep=(IngotError, MemoryError), cancels=True):
            return self._awaited(call())

    def _example(self) -> dict[str, Array]:
        """Return the inputs of the model's ``example``; empty if it has none."""
        if not callable(example := getattr(self._model, "example", None)):
            return {}
        where = f"{self._name}.example"
        found = self._loading(example, "example")
        if self._interface.by_sample and not isinstance(found, list):
            found = [found]
        specs = self.signature.inputs
        if isinstance(found, dict) and len(specs) == 1 and self._interface.bare:
            raise InvalidArgument(f"{where} returned a dict; return the value of the only input itself")
        inputs, failures = tensors_of(specs, found, None, where)
        if failures:
            raise InvalidArgument(f"{where} returned an exception")
        check_inputs(self.signature, inputs)
        return inputs


async def _gathered(values: Sequence[Any]) -> list[Any]:
    """Return values, with the results or exceptions of those that are awaitable instead of these."""
    found = await asyncio.gather(*map(_single, values), return_exceptions=True)
    return [foreign.contained(each, cancels=True) if isinstance(each, BaseException) else each for each in found]


async def _single(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _device(device: str) -> str:
    if devices.kind_of(device) == "auto":
        device = "cuda" if devices.has_cuda() else "cpu"
    return f"cuda:{nvml.roomiest()}" if device == "cuda" else device


def _hint(error: BaseException | None) -> str:
    if isinstance(error, PermissionError):
        return (
            "; an engine process has no network, starts no programs, and writes only to its temporary folder; "
            "--permit allows more"
        )
    return _hint(error.__cause__ or error.__context__) if error else ""  # HTTP libraries wrap the PermissionError
