"""The precision of products of 32-bit floats on NVIDIA's GPUs: one for the whole process."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Lock

from ingot.errors import Unsupported

# Read by cuBLAS, cuDNN and TensorRT when they are first used: 0 forbids TF32, whatever a program asks for.
_OVERRIDE = "NVIDIA_TF32_OVERRIDE"

# The models that were opened, and those that are being opened. Closed ones are counted too: the libraries that they
# used do not read the variable again.
_users: Counter[str] = Counter()
_lock = Lock()
_opening: ContextVar[list[str] | None] = ContextVar("opening", default=None)


def use_precision(precision: str) -> None:
    """Compute products of 32-bit floats in ``f32``, or in ``tf32`` where libraries are asked for it.

    Options of engines do not guarantee ``f32``: ONNX Runtime computes convolutions for which cuDNN has no other plan in
    TF32 after all, and TensorRT uses TF32 by default. Call this before an engine loads CUDA's libraries.

    Args:
        precision: ``tf32``; any other is ``f32``.

    Raises:
        Unsupported: an earlier model of this process had the other one.
    """
    wanted, other = ("tf32", "f32") if precision == "tf32" else ("f32", "tf32")
    with _lock:
        if _users[other]:
            raise Unsupported(
                f"the model is computed in {wanted} and another one of this process in {other}, but NVIDIA's libraries "
                "have one setting for both, which stays until the process ends, even if the other model is unloaded; "
                "run them in engine processes (--isolate all), or in two servers, or restart and name the variant to "
                "serve (name:version#variant)"
            )
        _users[wanted] += 1
        if wanted == "f32":
            os.environ[_OVERRIDE] = "0"
        else:
            os.environ.pop(_OVERRIDE, None)
    if (opening := _opening.get()) is not None:
        opening.append(wanted)


@contextlib.contextmanager
def released_on_failure() -> Iterator[None]:
    """Leave the precision to other models if the model that is opened within cannot be: it computed nothing."""
    used: list[str] = []
    token = _opening.set(used)
    try:
        yield
    except BaseException:  # whatever ends the load
        with _lock:
            _users.subtract(used)
        raise
    finally:
        _opening.reset(token)
