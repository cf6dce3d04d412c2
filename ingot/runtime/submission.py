"""How a request is put to a model, in this process or in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ingot.runtime.entry import Reply
from ingot.runtime.fits import Key
from ingot.tensors import Array


class Cancellable(Protocol):
    """A request that was submitted."""

    done: bool

    def cancel(self) -> None:
        """Forget the request, as its client left."""


class Submit(Protocol):
    """Takes a request in, and returns at once; :meth:`ingot.runtime.dispatch.Dispatcher.submit` describes it."""

    def __call__(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: Key | None = None,
    ) -> Cancellable: ...
