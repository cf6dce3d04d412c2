"""Models that answer a request several times: each answer is computed from the one before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ingot.errors import InvalidArgument
from ingot.tensors import DType, Signature


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """How a model is run again after an answer.

    Attributes:
        inputs: inputs of the next call, each with the output of the last one that is its value. Others stay; without
            any, a request gets one answer.
        until: a BOOL output; the answer in which all of it is true is the last. Empty for none.
        steps: most answers to a request.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    until: str = ""
    steps: int = 256

    def check(self, signature: Signature) -> None:
        """Check the names against the signature that clients see.

        Raises:
            InvalidArgument: an input or output does not exist, or they differ.
        """
        inputs, outputs = ({spec.name: spec for spec in side} for side in (signature.inputs, signature.outputs))
        for name, output in self.inputs.items():
            if name not in inputs or output not in outputs:
                raise InvalidArgument(
                    f"--repeat {name}={output}: the model has the inputs {', '.join(inputs)} and the outputs "
                    f"{', '.join(outputs)}"
                )
            if inputs[name].dtype is not outputs[output].dtype or len(inputs[name].shape) != len(outputs[output].shape):
                raise InvalidArgument(f"the output {outputs[output]} cannot be the input {inputs[name]}: they differ")
        if self.until and (self.until not in outputs or outputs[self.until].dtype is not DType.BOOL):
            flags = ", ".join(name for name, spec in outputs.items() if spec.dtype is DType.BOOL) or "none"
            raise InvalidArgument(f"--repeat-until {self.until} is not a BOOL output of the model; there are: {flags}")
