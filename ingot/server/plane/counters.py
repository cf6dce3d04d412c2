"""The counters of requests, for the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Final

from ingot.errors import IngotError
from ingot.runtime import Metrics
from ingot.runtime.counts import Count
from ingot.serving import ServedModel

_clock: Final = time.perf_counter


class Counters:
    """The counters of one model's requests over one protocol."""

    def __init__(self, metrics: Metrics, model: ServedModel, protocol: str):
        labels = (model.name, model.version, protocol)
        self._seconds = metrics.request_seconds.labels(*labels)
        self._labelled = functools.partial(metrics.requests.labels, *labels)
        self._codes: dict[str, Count] = {}
        self._ok: Count = self._labelled("ok")

    def succeeded(self, began: float) -> None:
        self._ok.value += 1
        self._seconds.observe(_clock() - began)

    def count(self, code: str, began: float) -> None:
        count = self._codes.get(code)
        if count is None:
            count = self._codes[code] = self._labelled(code)
        count.value += 1
        self._seconds.observe(time.perf_counter() - began)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count the request that the block answers, by its outcome."""
        began = _clock()
        try:
            yield
        except IngotError as error:
            self.count(error.code.value, began)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.count("cancelled", began)
            raise
        self.succeeded(began)
