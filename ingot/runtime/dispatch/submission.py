"""How a request is put to a model, in this process or in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ingot.runtime.dispatch.signature_check import InputKey
from ingot.runtime.scheduling.entry import Reply
from ingot.tensors import Array


class Cancellable(Protocol):
    """A request that was submitted."""

    done: bool

    def cancel(self) -> None:
        """Forget the request, as its client left."""


class Submit(Protocol):
    """Accept a request and return at once; see :meth:`ingot.runtime.dispatch.dispatcher.Dispatcher.submit`."""

    def __call__(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: InputKey | None = None,
    ) -> Cancellable: ...
