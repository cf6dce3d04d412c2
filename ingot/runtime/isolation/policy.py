"""Which engines run in engine processes."""

from __future__ import annotations

from ingot.bounds import Bounds
from ingot.runtime.isolation.process_engine import Isolation
from ingot.runtime.settings import Settings

_FORMATS = {
    "pt2": "its format pt2 can run its author's code",
    "aoti": "its format aoti is its author's native code",
    "partitioned": "it has parts in formats that can run their author's code",
}


def isolation_of(settings: Settings, doubt: str) -> Isolation | None:
    """Return why and how a model's engines run in engine processes; None if they run in the server's.

    Args:
        settings: ``isolate`` and the limits.
        doubt: :func:`doubt_of` the model.
    """
    why = doubt or ("every model is isolated" if settings.isolate == "all" else "")
    if not why or settings.isolate == "none":
        return None
    return Isolation(
        why=why,
        required=settings.isolate == "all",
        memory_mb=settings.engine_memory_mb,
        load_timeout=settings.load_timeout,
        call_mb=settings.engine_call_mb if doubt else None,  # otherwise it is predicted
        lanes=settings.lanes,
    )


def doubt_of(settings: Settings, format: str, bounds: Bounds | None) -> str:  # noqa: A002 - as archives call it
    """Return why a model might end or freeze the process that runs it; empty if it is proved that it does not.

    Args:
        settings: the native library of custom operators, if any.
        format: of the file.
        bounds: of its graph; None for other formats than ``onnx``.
    """
    if bounds is None:
        return _FORMATS.get(format, f"its format is {format}")
    if settings.ort_library is not None:
        return "--ort-library is native code"
    if bounds.bounded:
        return ""
    more = len(bounds.reasons) - 1
    return f"{bounds.reasons[0]}{f' (and {more} more)' if more else ''}"
