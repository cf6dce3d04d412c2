"""Signature checks of inputs, done once for all requests with the same names, types and shapes.

The values of inputs with a declared range are checked in each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot import tensors
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.scheduling.entry import group_of
from ingot.tensors import Array, Signature

# Bounded, since clients can send any number of shapes.
_MOST = 1024

InputKey = tuple[Any, ...]
"""The names, types and shapes of a request's inputs; requests with equal keys match a signature alike."""


def key_of(inputs: Mapping[str, Array]) -> InputKey:
    """Return the names, types and shapes of inputs."""
    return tuple((name, array.dtype, array.shape) for name, array in inputs.items())


@dataclass(frozen=True)
class CheckedInputs:
    """The result of a signature check: the number of samples, and which requests they may be joined with.

    ``nbytes`` is the size of the inputs; -1 if it varies between inputs of these types and shapes.
    """

    samples: int
    group: tuple[Any, ...] = ()
    nbytes: int = -1


class SignatureCheck:
    """Checks inputs against a model's signature.

    Args:
        signature: the model's.
        padding: for a model whose requests may be padded to one size.
    """

    def __init__(self, signature: Signature, padding: PaddingPolicy | None = None):
        self._signature = signature
        self._padding = padding
        self._known: dict[InputKey, CheckedInputs] = {}
        self._valued = tuple(spec for spec in signature.inputs if spec.values is not None)
        # The values of an input that all samples share are part of the group.
        self._by_shape = signature.batch is None or all(signature.batch in spec.shape for spec in signature.inputs)

    def find(self, inputs: Mapping[str, Array], key: InputKey | None = None) -> CheckedInputs:
        """Check inputs; ``key`` is their :func:`key_of`, if the caller knows it.

        Raises:
            InvalidArgument: they do not match; the message names the input.
        """
        key = key or key_of(inputs)
        found = self._known.get(key)
        if found is not None:
            for spec in self._valued:
                tensors.check_values(spec, inputs[spec.name])
            return found
        sizes = tensors.check_inputs(self._signature, inputs)
        batch = self._signature.batch
        texts = any(array.dtype == object for array in inputs.values())
        nbytes = -1 if texts else sum(array.nbytes for array in inputs.values())
        if batch is None:
            checked = CheckedInputs(1, (), nbytes)
        elif sizes.get(batch) == 0:
            # Empty requests run alone: their results could not be separated from those of others.
            return CheckedInputs(1, (object(),), nbytes)
        elif self._padding is not None:
            checked = CheckedInputs(sizes.get(batch, 1), self._padding.group(inputs), nbytes)
        else:
            checked = CheckedInputs(sizes.get(batch, 1), group_of(self._signature, inputs), nbytes)
        if self._by_shape:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = checked
        return checked
