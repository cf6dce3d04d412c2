"""The server's settings as options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ingot.config import ServerConfig
from ingot.config.setting import Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A configuration file (ingot.toml) with settings and models. \\[default: INGOT_CONFIG, else none]",
        show_default=False,
    ),
]


_FORMER = {"--no-management": "--management off", "--no-watch": "--watch off"}


def with_settings(command: _Command) -> _Command:
    """Add an option for each setting to a command, which takes the values as ``**settings``: None if not given.

    ``--help`` shows the common ones, ``--help-all`` every one.
    """
    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    options = [_option(setting) for setting in ServerConfig.settings().values() if not setting.file_only]
    command.__signature__ = inspect.Signature([*own, *options, _ALL])  # type: ignore[attr-defined]
    return command


def chosen(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave."""
    return {name: value for name, value in settings.items() if value is not None}


def replacement(option: str) -> str | None:
    """Return the successor of a former option of a setting; None for any other option."""
    if option in _FORMER:
        return f"write {_FORMER[option]}"
    settings = ServerConfig.settings().values()
    name = next((setting.name for setting in settings if setting.file_only and setting.option == option), None)
    if name is None:
        return None
    return f"set {name} in ingot.toml" + (", or see ingot server canary --help" if name.startswith("canary") else "")


def _help_all(context: typer.Context, wanted: bool | None) -> None:
    if wanted:
        for option in context.command.params:
            option.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        bool | None,
        typer.Option(
            "--help-all",
            show_default=False,
            callback=_help_all,
            is_eager=True,
            help="Show every setting as an option, and exit; ingot.toml has them too.",
        ),
    ],
)


def _option(setting: Setting) -> inspect.Parameter:
    """Return the parameter of a setting's option; None leaves the variable, the file or the default."""
    flags = [setting.option]
    if setting.default is True:
        flags = [f"{setting.option}/--no-{setting.option.removeprefix('--')}"]
    option = typer.Option(
        *flags,
        help=f"{setting.help}. \\[default: {setting.shown_default}]",  # typer would put it in parentheses
        rich_help_panel=setting.group,
        show_default=False,
        metavar="<time>" if setting.duration else None,
        hidden=not setting.common,
    )
    kind = str if setting.duration else setting.kind
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
