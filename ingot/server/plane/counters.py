"""The counters of requests, for the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Final

from ingot.errors import IngotError
from ingot.model_store import Golden
from ingot.runtime import Metrics
from ingot.runtime.counts import Count
from ingot.serving import ServedModel

_clock: Final = time.perf_counter


class Counters:
    """The counters of one model's requests over one protocol; ``keep`` records some of them."""

    def __init__(self, metrics: Metrics, model: ServedModel, protocol: str, keep: Callable[[str, str, Golden], None]):
        self._keep = functools.partial(keep, model.name, model.version)
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

    def keep(self, case: Golden) -> None:
        """Record an answered request, if the server does so."""
        self._keep(case)

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
