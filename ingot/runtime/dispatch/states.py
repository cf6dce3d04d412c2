"""The states of a model: inputs whose next values are outputs, and which clients do not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArgument
from ingot.tensors import Array, Signature, TensorSpec, symbols

Arrays = Mapping[str, Array]


class States:
    """Makes, checks and takes off the states of requests.

    Args:
        signature: the model's.
        outputs: the output that is each state's next value.

    Attributes:
        signature: the model's without its states, as clients see it.
        outputs: as given.

    Raises:
        InvalidArgument: ``outputs`` do not fit the signature.
    """

    def __init__(self, signature: Signature, outputs: Mapping[str, str]):
        self.signature = _without(signature, outputs)
        self.outputs = outputs
        self._full = signature
        self._hidden = frozenset(outputs.values())
        self._specs = [spec for spec in signature.inputs if spec.name in outputs]

    def first(self, inputs: Arrays) -> Arrays:
        """Return zeros; dimensions that the inputs of a request do not have begin with their least size."""
        sizes = self._sizes(inputs)

        def begin(spec: TensorSpec) -> Array:
            shape = [dim if isinstance(dim, int) else sizes.get(dim, self._full.range(dim).low) for dim in spec.shape]
            if spec.dtype.numpy.kind == "O":
                return np.full(shape, b"", object)
            return np.zeros(shape, spec.dtype.numpy)

        return {spec.name: begin(spec) for spec in self._specs}

    def after(self, outputs: Arrays) -> Arrays:
        """Return copies of the next states: outputs are parts of a batch, which a reference would keep."""
        return {name: np.array(outputs[output]) for name, output in self.outputs.items()}

    def without(self, outputs: Arrays) -> Arrays:
        """Return the outputs that clients see."""
        return {name: array for name, array in outputs.items() if name not in self._hidden}

    def check_sizes(self, inputs: Arrays, state: Arrays) -> None:
        """Check that a request has the sizes with which its sequence began.

        Raises:
            InvalidArgument: it has others.
        """
        sizes = self._sizes(inputs)
        for spec in self._specs:
            for dim, kept in zip(spec.shape, state[spec.name].shape, strict=True):
                if isinstance(dim, str) and sizes.get(dim, kept) != kept:
                    raise InvalidArgument(
                        f"dimension '{dim}' of the request is {sizes[dim]}, and its sequence began with {kept}; start "
                        "a sequence for each size"
                    )

    def _sizes(self, inputs: Arrays) -> Mapping[str, int]:
        """Return the sizes of named dimensions; wrong inputs are refused later."""
        return {
            dim: found
            for spec in self.signature.inputs
            if spec.name in inputs
            for dim, found in zip(spec.shape, inputs[spec.name].shape, strict=False)
            if isinstance(dim, str)
        }


def parse_pairs(text: str | None) -> dict[str, str]:
    """Parse ``input=output,input=output``.

    Raises:
        InvalidArgument: an input or an output occurs twice.
    """
    pairs = [part.split("=") for part in (text or "").split(",") if part]
    found = {name.strip(): output.strip() for name, output in pairs}
    if len(set(found.values())) < len(pairs):
        raise InvalidArgument(f"'{text}' has an input or an output twice")
    return found


def _without(signature: Signature, states: Mapping[str, str]) -> Signature:
    """Return a signature without its states.

    Args:
        signature: the model's.
        states: the output that is each input's next value.

    Raises:
        InvalidArgument: an input or output does not exist, they differ, or the first value is not known.
    """
    inputs, outputs = ({spec.name: spec for spec in side} for side in (signature.inputs, signature.outputs))
    for name, output in states.items():
        for what, tensor, known in (("input", name, inputs), ("output", output, outputs)):
            if tensor not in known:
                raise InvalidArgument(
                    f"the model has no {what} '{tensor}' for the state '{name}={output}'; it has {', '.join(known)}"
                )
        before, after = inputs[name], outputs[output]
        if before.dtype is not after.dtype or len(before.shape) != len(after.shape):
            raise InvalidArgument(f"the output {after} cannot be the next value of the input {before}: they differ")
    rest = replace(
        signature,
        inputs=tuple(spec for spec in signature.inputs if spec.name not in states),
        outputs=tuple(spec for spec in signature.outputs if spec.name not in states.values()),
    )
    if not rest.inputs or not rest.outputs:
        raise InvalidArgument("the model has no inputs or no outputs except its states")
    for name in states:
        for dim in set(symbols([inputs[name]])) - set(rest.symbols):
            bounds = signature.range(dim)
            if bounds.low not in (0, bounds.high):
                raise InvalidArgument(
                    f"the first size of dimension '{dim}' of the state '{name}' is not known: no other input has it. "
                    f"Export the model with a range that begins at 0: {dim}=0.."
                )
    return rest
