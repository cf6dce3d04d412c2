"""Which engines run in engine processes."""

from __future__ import annotations

import importlib.util

from ingot.bounds import Bounds
from ingot.errors import Unsupported, missing_package
from ingot.report import units
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.machine import devices
from ingot.runtime.settings.settings import Settings

PYTHON = "it is its author's code in Python"
"""Why a model in Python runs in an engine process, whatever ``isolate`` is."""
_FORMATS = {
    "pt2": "its format pt2 can run its author's code",
    "aoti": "its format aoti is its author's native code",
    "python": PYTHON,
    "partitioned": "it has parts in formats that can run their author's code",
}


def check_shards(settings: Settings, format: str) -> None:  # noqa: A002 - as archives call it
    """Check that a model can be divided over processes, if the settings ask for that.

    Raises:
        Unsupported: it cannot, because of its format, other settings, or the number of GPUs.
    """
    count, device = settings.shards, settings.device
    if count == 1:
        return
    if format != "pt2":
        raise Unsupported(
            f"a model of format '{format}' cannot be divided over {count} processes; export it with --to pt2, or leave "
            "out --shards"
        )
    if importlib.util.find_spec("torch") is None:
        raise missing_package("torch", "--shards", "export")
    if settings.isolate == "none":
        raise Unsupported(f"the {count} processes of --shards are engine processes; leave out --isolate none")
    if settings.instances > 1:
        raise Unsupported(f"--shards {count} runs one copy of a model; leave out --instances {settings.instances}")
    named = devices.spread(device)
    if ":" in device and len(named) != count:
        raise Unsupported(
            f"--device {device} names {units.counted(len(named), 'device')}, and --shards {count} needs {count}; name "
            f"{count}, or give --device {devices.kind_of(device)} for the first {count}"
        )
    gpus = devices.gpu_count()
    visible = f"{units.counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} visible"
    if devices.kind_of(device) == "cuda" and len({*named}) < len(named):
        raise Unsupported(f"--device {device} names a GPU twice; each process of --shards {count} needs its own")
    for each in named if device.startswith("cuda:") and gpus else ():
        if int(each.partition(":")[2]) >= gpus:
            raise Unsupported(
                f"device '{each}' is not available: {visible}, counted from cuda:0; give others in --device"
            )
    if (devices.kind_of(device) == "cuda" or (device == "auto" and gpus)) and gpus < count:
        raise Unsupported(
            f"--shards {count} needs {count} GPUs, and {visible}; "
            + (f"give --shards {gpus}" if gpus > 1 else "leave out --shards")
            + ", or give --device cpu"
            if gpus
            else f"device '{device}' is not available: there is no NVIDIA driver or GPU; give --device cpu"
        )


def isolation_of(
    settings: Settings,
    format: str,  # noqa: A002 - as archives call it
    risk: str,
    *,
    planned: bool = False,
) -> Isolation | None:
    """Return why and how a model's engines run in engine processes; None if they run in the server's.

    Args:
        settings: ``isolate``, ``shards`` and the limits.
        format: of the file; code in Python always runs in engine processes.
        risk: :func:`risk_of` the model.
        planned: whether the model has a tensor-parallel plan.
    """
    if settings.shards > 1:
        how = "by its tensor-parallel plan" if planned else "in stages"
        risk = f"it is divided over {settings.shards} processes {how}"
    why = risk or ("every model is isolated" if settings.isolate == "all" else "")
    code = format == "python"
    if not why or (settings.isolate == "none" and not code):
        return None
    return Isolation(
        why=why,
        required=code or settings.isolate == "all" or settings.shards > 1,
        memory_mb=settings.engine_memory_mb,
        load_timeout=settings.load_timeout,
        call_mb=settings.engine_call_mb if risk else None,  # otherwise it is predicted
        lanes=settings.lanes,
    )


def risk_of(settings: Settings, format: str, bounds: Bounds | None) -> str:  # noqa: A002 - as archives call it
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
