"""The states of a model: inputs whose next values are outputs, and which clients do not see.

Controls, as Triton calls them, are inputs that say where in its sequence a request is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, Signature, TensorSpec, symbols

Arrays = Mapping[str, Array]


_CONTROL = re.compile(r"@(start|end|ready|id)(?::(-?[\d.]+):(-?[\d.]+))?")


@dataclass(frozen=True)
class Control:
    """A control input: whether the request starts or ends its sequence, that it is ready, or the sequence's id.

    ``false`` and ``true`` are the values for no and yes.
    """

    kind: str
    false: float = 0
    true: float = 1

    @classmethod
    def parse(cls, text: str) -> Control | None:
        """Return the control that is written as ``@start``, or ``@start:FALSE:TRUE``; None for the name of an output.

        Raises:
            InvalidArgument: it is neither.
        """
        if not text.startswith("@"):
            return None
        match = _CONTROL.fullmatch(text)
        try:
            if match is None or (match[1] == "id" and match[2]):
                raise ValueError
            return cls(match[1]) if match[2] is None else cls(match[1], float(match[2]), float(match[3]))
        except ValueError:
            raise InvalidArgument(
                f"'{text}' is not a control; there are @start, @end and @ready, with other values than 0 and 1 as in "
                "@start:-1:1, and @id"
            ) from None

    def value(self, spec: TensorSpec, name: int | str, *, start: bool, end: bool) -> bytes | float:
        """Return the value for a request of the sequence ``name``.

        Raises:
            InvalidArgument: the name does not fit the input's datatype.
        """
        if self.kind != "id":
            return self.true if {"start": start, "end": end, "ready": True}[self.kind] else self.false
        if spec.dtype is DType.BYTES:
            return str(name).encode()
        if not isinstance(name, int):
            raise InvalidArgument(f"sequence_id is a text, and the model's input {spec} needs a whole number")
        bits = spec.dtype.numpy.itemsize * 8
        low = name & ((1 << bits) - 1)  # the low-order bits, as Triton does
        return low - (1 << bits) if spec.dtype.numpy.kind == "i" and low >> (bits - 1) else low


class States:
    """Makes, checks and takes off the states of requests, and makes their controls.

    Args:
        signature: the model's signature.
        pairs: the output that is each state's next value, or a control; see :class:`Control`.

    Attributes:
        signature: the model's without its states and controls, as clients see it.
        hidden: the inputs that clients do not send.

    Raises:
        InvalidArgument: ``pairs`` do not fit the signature.
    """

    def __init__(self, signature: Signature, pairs: Mapping[str, str]):
        found = {name: Control.parse(output) for name, output in pairs.items()}
        self.signature = _without(signature, pairs, {name for name, control in found.items() if control is not None})
        self.hidden = pairs.keys()
        self._outputs = {name: output for name, output in pairs.items() if found[name] is None}
        self._full = signature
        self._hidden_outputs = frozenset(self._outputs.values())
        self._specs = [spec for spec in signature.inputs if spec.name in self._outputs]
        self._controls = [(spec, control) for spec in signature.inputs if (control := found.get(spec.name)) is not None]

    def controls(self, inputs: Arrays, name: int | str, *, start: bool, end: bool) -> Arrays:
        """Return the controls of a request.

        Raises:
            InvalidArgument: the sequence's name does not fit an input.
        """
        if not self._controls:
            return {}
        sizes = self._sizes(inputs)
        return {
            spec.name: np.full(
                self._shape(spec, sizes), control.value(spec, name, start=start, end=end), spec.dtype.numpy
            )
            for spec, control in self._controls
        }

    def _shape(self, spec: TensorSpec, sizes: Mapping[str, int]) -> list[int]:
        return [dim if isinstance(dim, int) else sizes.get(dim, self._full.range(dim).low) for dim in spec.shape]

    def first(self, inputs: Arrays) -> Arrays:
        """Return zeros; dimensions that the inputs of a request do not have begin with their least size."""
        sizes = self._sizes(inputs)

        def begin(spec: TensorSpec) -> Array:
            shape = self._shape(spec, sizes)
            if spec.dtype.numpy.kind == "O":
                return np.full(shape, b"", object)
            return np.zeros(shape, spec.dtype.numpy)

        return {spec.name: begin(spec) for spec in self._specs}

    def after(self, outputs: Arrays) -> Arrays:
        """Return copies of the next states: outputs are parts of a batch, which a reference would keep."""
        return {name: np.array(outputs[output]) for name, output in self._outputs.items()}

    def without(self, outputs: Arrays) -> Arrays:
        """Return the outputs that clients see."""
        return {name: array for name, array in outputs.items() if name not in self._hidden_outputs}

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
    """Parse ``input=output,input=output``; an output may be a control, such as ``@start``.

    Raises:
        InvalidArgument: it is not of this form, or an input or an output occurs twice.
    """
    pairs = [part.split("=") for part in (text or "").split(",") if part]
    if any(len(pair) != 2 or not all(map(str.strip, pair)) for pair in pairs):
        raise InvalidArgument(f"'{text}' has no pairs of an input and an output; write them as h=h_next,c=c_next")
    found = {name.strip(): output.strip() for name, output in pairs}
    if len(set(found.values())) < len(pairs):
        raise InvalidArgument(f"'{text}' has an input or an output twice")
    return found


def _without(signature: Signature, states: Mapping[str, str], controls: Set[str]) -> Signature:
    """Return a signature without its states and controls.

    Args:
        signature: the model's signature.
        states: the output that is each input's next value.
        controls: the inputs of ``states`` that are controls, which have no output.

    Raises:
        InvalidArgument: an input or output does not exist, they differ, or the first value is not known.
    """
    inputs, outputs = ({spec.name: spec for spec in side} for side in (signature.inputs, signature.outputs))
    for name, output in states.items():
        for what, tensor, known in (("input", name, inputs), ("output", output, outputs)):
            if tensor not in known and (what == "input" or name not in controls):
                raise InvalidArgument(
                    f"the model has no {what} '{tensor}' for the state '{name}={output}'; it has {', '.join(known)}"
                )
        if name in controls:
            _check_control(inputs[name], output)
            continue
        before, after = inputs[name], outputs[output]
        if before.dtype is not after.dtype or len(before.shape) != len(after.shape):
            raise InvalidArgument(f"the output {after} cannot be the next value of the input {before}: they differ")
    left = tuple(spec for spec in signature.inputs if spec.name not in states)
    seen = tuple(spec for spec in signature.outputs if spec.name not in states.values())
    if not left or not seen:
        raise InvalidArgument("the model has no inputs or no outputs except its states")
    rest = replace(signature, inputs=left, outputs=seen)
    for name in states:
        for dim in set(symbols([inputs[name]])) - set(rest.symbols):
            bounds = signature.range(dim)
            if bounds.low not in (0, bounds.high):
                raise InvalidArgument(
                    f"the first size of dimension '{dim}' of the state '{name}' is not known: no other input has it. "
                    f"Export the model with a range that begins at 0: {dim}=0.."
                )
    return rest


def _check_control(spec: TensorSpec, control: str) -> None:
    kinds = "iuO" if control == "@id" else "biuf"
    if spec.dtype.numpy.kind not in kinds:
        raise InvalidArgument(f"the input {spec} cannot be the control {control}: its datatype does not fit")
