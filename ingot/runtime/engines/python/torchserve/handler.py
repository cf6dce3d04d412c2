"""A handler of TorchServe as a class in Python that an engine runs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ingot import foreign
from ingot.errors import HandlerFailed, InvalidArgument
from ingot.runtime.engines.python import files
from ingot.runtime.engines.python.torchserve import answers, ts
from ingot.runtime.engines.python.torchserve.rows import (
    BODY,
    EXPLAIN,
    EXPLAINS,
    HEAD,
    REQUEST,
    HandlerRequest,
    unpacked,
)
from ingot.runtime.engines.python.torchserve.ts.context import Context
from ingot.runtime.engines.python.torchserve.ts.util import PredictionException, list_classes_from_module

log = logging.getLogger("torchserve")

MANIFEST, CONFIG = "MAR-INF/MANIFEST.json", "MAR-INF/model-config.json"
"""The archive's manifest, and its configuration file as JSON, if it has one."""

Entry = Callable[[Any, Context], Any]


class HandlerModel:
    """A model that calls a handler. Subclasses state how many requests it gets at most at once."""

    folder: Path
    file: str
    function: str
    config: Mapping[str, Any]
    inputs: Sequence[str]
    _raw = False
    outputs = (f"{BODY}:bytes[batch]", f"{HEAD}:bytes[batch]")

    def load(self, context: Any) -> None:
        """Import the handler's module, and let the handler load its model."""
        ts.install()
        os.chdir(self.folder)
        manifest = json.loads((self.folder / MANIFEST).read_text())
        properties = {
            "model_dir": str(self.folder),
            "gpu_id": int(context.device.partition(":")[2] or 0) if context.device.startswith("cuda") else None,
            "batch_size": batch_size(self.config),
            "server_name": "MMS",
            "server_version": ts.VERSION,
        }
        self._context = Context(manifest["model"]["modelName"], manifest, properties, self.config)
        self._entry = self._loaded()

    def predict(self, batch: Mapping[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Answer a batch.

        Raises:
            ValueError: a request is not valid.
            HandlerFailed: the handler failed.
        """
        requests = [unpacked(value, raw=self._raw) for value in batch[REQUEST]]
        answered: dict[int, tuple[bytes, bytes]] = {}
        for places in _calls(requests):
            answered.update(zip(places, self._answers([requests[place] for place in places]), strict=True))
        bodies, heads = zip(*(answered[place] for place in range(len(requests))), strict=True)
        return {BODY: [*bodies], HEAD: [*heads]}

    def _answers(self, requests: Sequence[HandlerRequest]) -> Iterable[tuple[bytes, bytes]]:
        """Return the body and the head of each answer of one call of the handler."""
        self._context.begin(requests)
        rows = [request.row for request in requests]
        results = foreign.outcome(lambda: self._entry(rows, self._context))
        if isinstance(results, Exception):
            raise self._failure(results) from results
        results = answers.checked(results, len(rows))
        parts = [b"".join(answers.bodies(self._context.parts.get(index, []))) for index in range(len(rows))]
        found = [part + body for part, body in zip(parts, answers.bodies(results), strict=True)]
        return zip(found, answers.heads(self._context, len(rows)), strict=True)

    def _loaded(self) -> Entry:
        """Return the function that answers: the module's, or the method of its only class."""
        module = files.imported(self.folder / self.file, "install the package, or pack the file (--extra-files)")
        if callable(function := getattr(module, self.function, None)):
            function(None, self._context)
            return cast("Entry", function)
        classes = list_classes_from_module(module)
        if len(classes) != 1 or not callable(getattr(classes[0], "handle", None)):
            named = ", ".join(each.__name__ for each in classes) or "none"
            raise InvalidArgument(
                f"{self.file} must have a function {self.function}(data, context), or one class with a method handle; "
                f"its classes are: {named}"
            )
        handler = classes[0]()
        handler.initialize(self._context)
        self._raw = getattr(handler, "raw", False) is True
        return cast("Entry", handler.handle)

    def _failure(self, error: Exception) -> HandlerFailed:
        """Return TorchServe's error; the log has the place of the failure."""
        log.error("%s raised %s", self.file, files.describe(error, self.folder))
        if isinstance(error, PredictionException):
            code = error.error_code
            return HandlerFailed(str(error.message), code if isinstance(code, int) else 500)
        if isinstance(error, MemoryError) or "CUDA" in str(error):
            return HandlerFailed("Out of resources", 507)
        return HandlerFailed("Prediction failed")


def _calls(requests: Sequence[HandlerRequest]) -> list[list[int]]:
    """Return the places of the requests of each call: handlers read from the first one whether and what to explain."""
    explained = [[place] for place, request in enumerate(requests) if request.headers.get(EXPLAIN) == EXPLAINS]
    others = [place for place in range(len(requests)) if [place] not in explained]
    return [others, *explained] if others else explained


def batch_size(config: Mapping[str, Any]) -> int:
    """Return the most requests that a handler gets at once: 1, unless its configuration says otherwise."""
    return max(1, int(config.get("batchSize") or 1))


def handler_class(folder: Path, file: str, function: str) -> type[HandlerModel]:
    """Return the class of a handler in an unpacked archive."""
    path = folder / CONFIG
    config = json.loads(path.read_text()) if path.is_file() else {}
    sys.path.insert(0, str(folder))
    given = {
        "folder": folder,
        "file": file,
        "function": function,
        "config": config,
        "inputs": (f"{REQUEST}:bytes[batch=1..{batch_size(config)}]",),
    }
    return type("Handler", (HandlerModel,), given)
