"""Options that several commands have, and groups of options: dataclasses that a command receives as one argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="The store's folder. \\[default: $INGOT_HOME, else ~/.ingot]", show_default=False),
]

LoadTimeout = Annotated[
    str,
    typer.Option(metavar="<time>", help="Time limit for an ONNX model to load and answer; 0 for no limit."),
]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_options(command: _Command) -> _Command:
    """Give a command an option for each field of the parameters that are dataclasses.

    The fields are annotated like parameters of a command, and keep their order among these. A text in the annotation
    of such a parameter, as in ``Annotated[Load, "Load"]``, is the panel of its options in the help.

    Raises:
        TypeError: a field has a ``default_factory``, so the default is not known.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups = {each.name: kind for each in parameters if (kind := _group(each.annotation)[0]) is not None}

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        # In a separate dict, as an option may have the name of a group.
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        return command(**given, **made)

    flat = [option for parameter in parameters for option in _options(parameter)]
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _group(annotation: Any) -> tuple[Any, str | None]:
    """Return the dataclass of a parameter and the panel of its options; None if it is an option itself."""
    kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return (kind, notes[0] if notes else None) if is_dataclass(kind) else (None, None)


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    kind, panel = _group(parameter.annotation)
    if kind is None:
        variable = inspect.Parameter.VAR_KEYWORD  # for the settings that with_settings adds
        yield parameter if parameter.kind is variable else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if field.default_factory is not MISSING:
            raise TypeError(
                f"{kind.__name__}.{field.name} has a default_factory, which options do not support; use a default"
            )
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_in_panel(hints[field.name], panel)
        )


def _in_panel(annotation: Any, panel: str | None) -> Any:
    if panel is None:
        return annotation
    kind, *notes = get_args(annotation)
    moved = [copy(note) for note in notes]  # other commands may have the same group in another panel
    for note in moved:
        if isinstance(note, ParameterInfo):
            note.rich_help_panel = panel
    return Annotated[(kind, *moved)]
