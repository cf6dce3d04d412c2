"""Signature checks of inputs, done once for all requests with the same names, types and shapes.

The values of inputs with a declared range are checked in each request.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot import tensors
from ingot.errors import TooLarge
from ingot.protocol.keys import InputKey, key_of
from ingot.report import units
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.machine import memory
from ingot.runtime.scheduling.entry import group_of
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

# Bounded, since clients can send any number of shapes.
_MOST = 1024


@dataclass(frozen=True)
class CheckedInputs:
    """The result of a signature check: the number of samples, and which requests they may be joined with.

    ``nbytes`` is the size of the inputs; -1 if it varies between inputs of these types and shapes. ``most`` is how many
    samples one call may have, and ``peak`` how many bytes it then takes; 0 if that cannot be predicted. ``sizes`` and
    ``work`` are those of an :class:`~ingot.runtime.scheduling.entry.Entry`.
    """

    samples: int
    group: tuple[Any, ...] = ()
    nbytes: int = -1
    most: int = sys.maxsize
    peak: int = 0
    sizes: tuple[int, ...] = ()
    work: int = 0


@dataclass(frozen=True)
class CallLimit:
    """The most memory of one engine call.

    Args:
        peak: returns an upper bound of a call's bytes, from the sizes of the signature's named dimensions.
        nbytes: the limit.
        model: its name, for messages.
    """

    peak: Callable[[Mapping[str, int]], int]
    nbytes: float
    model: str

    def samples(self, sizes: Mapping[str, int], batch: str | None, most: int) -> int:
        """Return how many samples of these sizes one call may have, at most ``most``.

        Raises:
            TooLarge: not even one.
        """
        if batch is None or batch not in sizes:
            self._check(self.peak(sizes), "")
            return most
        if self.peak({**sizes, batch: most}) <= self.nbytes:
            return most
        self._check(self.peak({**sizes, batch: 1}), " with one sample")
        fits, exceeds = 1, most
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self.peak({**sizes, batch: middle}) <= self.nbytes:
                fits = middle
            else:
                exceeds = middle
        return fits

    def note(self, sizes: Mapping[str, int], batch: str, fits: int, most: int) -> None:
        """Log that batches of these sizes have fewer samples than the largest batch."""
        others = ", ".join(f"{name} {size}" for name, size in sizes.items() if name != batch)
        log.warning(
            "model %s: batches%s have at most %d samples, not %d, as one more may take %s, over the limit of %s%s",
            self.model,
            others and f" of {others}",
            fits,
            most,
            units.size(peak := self.peak({**sizes, batch: fits + 1})),
            units.size(int(self.nbytes)),
            "; raise --max-call-mb (INGOT_MAX_CALL_MB)" if peak <= memory.engine_limit() else "",
        )

    def _check(self, peak: int, what: str) -> None:
        if peak <= self.nbytes:
            return
        available = memory.engine_limit()
        needed = math.ceil(peak / (1 << 20))
        remedy = (
            f"raise --max-call-mb (INGOT_MAX_CALL_MB) to {needed}"
            if peak <= available
            else f"run the server with more memory, of which its engines may use {units.size(int(available))} now"
        )
        raise TooLarge(
            f"an engine call of model '{self.model}'{what} of these sizes may take {units.size(peak)} of memory, over "
            f"the limit of {units.size(int(self.nbytes))}; send smaller inputs, or {remedy}"
        )


class SignatureCheck:
    """Checks inputs against a model's signature.

    Args:
        signature: the model's signature.
        padding: for a model whose requests may be padded to one size.
        most: samples of the largest batch; None if requests never share one.
        limit: of the memory of a call, if it can be predicted.
    """

    def __init__(
        self,
        signature: Signature,
        padding: PaddingPolicy | None = None,
        most: int | None = None,
        limit: CallLimit | None = None,
    ):
        self._most = most
        self._limit = limit
        self._signature = signature
        self._padding = padding
        self._noted = False
        self._known: dict[InputKey, CheckedInputs] = {}
        self._latest_key: InputKey | None = None
        self._latest: CheckedInputs | None = None
        self._valued = tuple(spec for spec in signature.inputs if spec.values is not None)
        # The values of an input that all samples share are part of the group.
        self._by_shape = signature.batch is None or all(signature.batch in spec.shape for spec in signature.inputs)

    def find(self, inputs: Mapping[str, Array], key: InputKey | None = None) -> CheckedInputs:
        """Check inputs; ``key`` is their :func:`key_of`, if the caller knows it.

        Raises:
            InvalidArgument: they do not match; the message names the input.
            TooLarge: a call with them would take too much memory.
        """
        key = key or key_of(inputs)
        # Repeated requests have the same key: hashing types and shapes would cost more than all else here.
        found = self._latest if key is self._latest_key else self._known.get(key)
        if found is not None:
            self._latest_key, self._latest = key, found
            for spec in self._valued:
                tensors.check_values(spec, inputs[spec.name])
            return found
        sizes = tensors.check_inputs(self._signature, inputs)
        batch = self._signature.batch
        texts = any(array.dtype == object for array in inputs.values())
        nbytes = -1 if texts else sum(array.nbytes for array in inputs.values())
        most, peak = self._memory(sizes if self._padding is None else {**sizes, **self._padding.padded(inputs)})
        if batch is None:
            checked = CheckedInputs(1, (), nbytes, most, peak)
        elif sizes.get(batch) == 0:
            # Empty requests run alone: their results could not be separated from those of others.
            return CheckedInputs(1, (object(),), nbytes)
        elif self._padding is None:
            checked = CheckedInputs(sizes.get(batch, 1), group_of(self._signature, inputs), nbytes, most, peak)
        else:
            samples, padded = sizes.get(batch, 1), self._padding.padder.sizes(inputs)
            work = self._padding.work(padded, samples)
            checked = CheckedInputs(samples, self._padding.group(inputs), nbytes, most, peak, padded, work)
        if self._by_shape:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = checked
        return checked

    def _memory(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return how many samples a call may have, and the bytes that it takes with as many of the request's as fit."""
        batch, most = self._signature.batch, self._most
        if self._limit is None:
            return sys.maxsize if most is None else most, 0
        if most is None or batch is None:  # the request is one call, whatever its size
            self._limit.samples(sizes, None, 1)
            return sys.maxsize, self._limit.peak(sizes)
        fits = self._signature.max_samples(self._limit.samples(sizes, batch, most))
        if fits < most and not self._noted:
            self._noted = True
            self._limit.note(sizes, batch, fits, most)
        return fits, self._limit.peak({**sizes, batch: min(sizes.get(batch, 1), fits)})
