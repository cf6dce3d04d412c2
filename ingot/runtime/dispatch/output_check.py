"""Checks of an engine's outputs, so that a faulty engine cannot answer with values of another type or another client.

Fixed dimensions are not compared: bare files may declare them wrongly, and the other samples are unaffected.
"""

from __future__ import annotations

from ingot.errors import InternalError
from ingot.tensors import Array, Signature


class OutputCheck:
    """Checks the outputs of one call against a model's signature. It runs for every call, so it reads only texts."""

    def __init__(self, signature: Signature):
        self._specs = {spec.name: spec for spec in signature.outputs}
        axes = signature.batch_axes(signature.outputs)
        # A rank of 0 may stand for an unknown one: bare files need not declare shapes.
        self._expected = [
            (spec.name, spec.dtype.numpy, len(spec.shape), axes.get(spec.name)) for spec in signature.outputs
        ]
        self._count = len(self._expected)

    def checked(self, outputs: dict[str, Array], samples: int) -> dict[str, Array]:
        """Return the outputs of the signature.

        Args:
            outputs: of the engine.
            samples: of the call.

        Raises:
            InternalError: one is missing, or has another datatype, rank or number of samples, or an element of a BYTES
                output is neither bytes nor a str.
        """
        for name, dtype, rank, axis in self._expected:
            array = outputs.get(name)
            if array is None:
                raise InternalError(f"the engine returned no output '{name}'")
            shape = array.shape
            if (array.dtype is not dtype and array.dtype != dtype) or (rank and len(shape) != rank):
                raise self._fault(name, array, samples)
            if axis is not None and shape[axis] != samples:
                raise self._fault(name, array, samples)
            if dtype.kind == "O" and (kinds := _unknown(array)):
                raise InternalError(
                    f"the engine returned elements of the type {kinds} in output '{name}', which is BYTES: they must "
                    "be bytes or str; the model or its engine is faulty"
                )
        if len(outputs) == self._count:
            return outputs
        return {name: outputs[name] for name in self._specs}

    def _fault(self, name: str, array: Array, samples: int) -> InternalError:
        return InternalError(
            f"the engine returned output '{name}' as {array.dtype} {list(array.shape)} for {samples} samples, but the "
            f"model's signature is {self._specs[name]}; the model or its engine is faulty"
        )


def _unknown(array: Array) -> str:
    """Return the names of the types of an object array's elements that are not texts."""
    kinds = {*map(type, array.reshape(-1).tolist())}
    return ", ".join(sorted(kind.__name__ for kind in kinds if not issubclass(kind, bytes | str)))
