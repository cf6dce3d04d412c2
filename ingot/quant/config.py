"""What can be asked of quantization: one frozen configuration a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class StaticInt8:
    """Weights and activations in 8 bits, with ranges learnt from calibration data (ONNX QDQ form).

    Activations are unsigned and weights signed (u8s8): the combination that ONNX Runtime fuses into integer kernels on
    x86, ARM and CUDA; s8s8 leaves float convolutions behind and measured slower than fp32.

    Attributes:
        per_channel: one scale an output channel, which keeps accuracy where channels differ in size.
        calibration: how ranges are taken from the data.
        keep: names of ONNX nodes that stay in floating point.
    """

    name: ClassVar[str] = "static-int8"
    precision: ClassVar[str] = "int8"

    per_channel: bool = True
    calibration: Literal["minmax", "entropy", "percentile"] = "minmax"
    keep: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the recipe as it is noted in archives."""
        return {"name": self.name, "version": 1, **asdict(self)}
