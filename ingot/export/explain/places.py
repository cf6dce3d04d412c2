"""The line of the user's code at which an exporter failed."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import fx, nn

from ingot import foreign

_EXPORT = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(os.__file__).parent
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The file's name and the line, without the user's folders, for reports that are shared."""
        return f"{Path(self.file).name}:{self.line}"


def find_place(error: BaseException) -> Place | None:
    """Return the innermost line of the user's code in an error, or None.

    Exporters report it in one of three ways: as a stack of the code that they interpret, in the message, or by running
    the code, which is then part of the traceback.
    """
    for item in foreign.causes(error):
        for frames in (_interpreted(item), frames_in(str(item)), _ran(item)):
            if (place := innermost(frames)) is not None:
                return place
    return None


def innermost(frames: Iterable[Place]) -> Place | None:
    """Return the last of the frames that is in the user's code, or None."""
    own = [place for place in frames if _is_users(place.file)]
    return own[-1] if own else None


def of_node(node: fx.Node) -> Place | None:
    """Return the line of the user's code, or else of a library, that a node of a captured graph comes from."""
    frames = frames_in(node.meta.get("stack_trace") or "")
    return innermost(frames) or (frames[-1] if frames else None)


def onnx_stacks(model: ir.Model) -> dict[str, str]:
    """Return the stack traces that PyTorch's exporter left in an ONNX graph, by the outputs of its nodes."""
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = (node for body in bodies for node in body.all_nodes())
    stacks = ((node, node.metadata_props.get("pkg.torch.onnx.stack_trace", "")) for node in nodes)
    return {value.name: stack for node, stack in stacks if stack for value in node.outputs if value.name}


def frames_in(text: str) -> list[Place]:
    """Return the lines of code in a message or a stack trace."""
    return [Place(file, int(line), function.rstrip(",") or "forward") for file, line, function in _FRAME.findall(text)]


def forward_of(module: nn.Module) -> Place | None:
    """Return the first line of the user's ``forward``, for errors without a line.

    None for a module of PyTorch, or of TorchScript, which has no file.
    """
    if isinstance(module, torch.jit.ScriptModule):  # its forward is not Python, and cannot be unwrapped
        return None
    forward = inspect.unwrap(type(module).forward)
    try:
        file, line = inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
    except (OSError, TypeError):
        return None
    return Place(file, line, "forward") if file is not None and _is_users(file) else None


def _interpreted(error: BaseException) -> list[Place]:
    return _places(getattr(error, "real_stack", None) or ())


def _ran(error: BaseException) -> list[Place]:
    places = _places(traceback.extract_tb(error.__traceback__))
    inside = [index for index, place in enumerate(places) if Path(place.file).is_relative_to(_TORCH)]
    return places[inside[0] :] if inside else []  # without the callers of torch, such as a test


def _places(frames: Iterable[traceback.FrameSummary]) -> list[Place]:
    return [Place(frame.filename, frame.lineno or 0, frame.name) for frame in frames]


def _is_users(file: str) -> bool:
    path = Path(file)
    if any(path.is_relative_to(folder) for folder in (_TORCH, _EXPORT)) or not path.is_file():
        return False
    return not path.is_relative_to(_PYTHON) or "-packages" in file
