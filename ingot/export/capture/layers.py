"""What of PyTorch is replaced while a module is captured, because its capture would fix a dynamic size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ingot.export.capture import functions, recurrent


@contextlib.contextmanager
def dynamic(module: nn.Module) -> Iterator[None]:
    """Let the layers of a module be captured at any size."""
    with functions.dynamic(), recurrent.opaque() if recurrent.used_by(module) else contextlib.nullcontext():
        yield
