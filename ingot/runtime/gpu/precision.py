"""The precision of products of 32-bit floats on NVIDIA's GPUs: one for the whole process."""

from __future__ import annotations

import os

from ingot.errors import Unsupported

# Read by cuBLAS, cuDNN and TensorRT when they are first used: 0 forbids TF32, whatever a program asks for.
_OVERRIDE = "NVIDIA_TF32_OVERRIDE"

_used: set[str] = set()


def use_precision(precision: str) -> None:
    """Compute products of 32-bit floats in ``f32``, or in ``tf32`` where libraries are asked for it.

    Options of engines do not guarantee ``f32``: ONNX Runtime computes convolutions for which cuDNN has no other plan in
    TF32 after all, and TensorRT uses TF32 by default. Call this before an engine loads CUDA's libraries.

    Args:
        precision: ``tf32``; any other is ``f32``.

    Raises:
        Unsupported: an earlier model of this process has the other one.
    """
    wanted = "tf32" if precision == "tf32" else "f32"
    if _used and wanted not in _used:
        raise Unsupported(
            f"the model is computed in {wanted} and another one of this process in {min(_used)}, but NVIDIA's "
            "libraries have one setting for both; run them in engine processes (--isolate all), or in two servers"
        )
    _used.add(wanted)
    if wanted == "f32":
        os.environ[_OVERRIDE] = "0"
    else:
        os.environ.pop(_OVERRIDE, None)
