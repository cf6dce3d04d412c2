"""Engines and devices of other packages, which register them by entry points.

``ingot.engines``: a function ``(path, *, device, threads) -> Engine``, by the name of the engine or its format.
``ingot.devices``: a function ``(index) -> Device``, by the kind of device: ``npu`` for ``--device npu:0``. A package
that adds a device to PyTorch does so when the module of its entry point is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Literal

from ingot import foreign
from ingot.errors import Unsupported

Group = Literal["ingot.engines", "ingot.devices"]


def names(group: Group) -> list[str]:
    """Return the names of a group's plug-ins."""
    return sorted(entry_points(group=group).names)


def find(group: Group, name: str) -> Callable[..., Any] | None:
    """Return the object that a plug-in registers; None if there is no plug-in of that name.

    Raises:
        Unsupported: it cannot be imported.
    """
    for point in entry_points(group=group, name=name):
        with foreign.reported_as(Unsupported, f"the plug-in '{name}' of {group} ({point.value}) cannot be loaded"):
            loaded: Callable[..., Any] = point.load()
            return loaded
    return None
