"""``ingot config``: the configuration file of a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import Json
from ingot.cli.output import print_json, say
from ingot.cli.settings import ConfigOption, chosen, with_settings
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument

if TYPE_CHECKING:
    from ingot.config.changes import Changes
    from ingot.config.configuration import Configuration
    from ingot.config.given import Given

config = typer.Typer(
    help="Check, show and describe the configuration file of a server (ingot serve --config).", no_args_is_help=True
)


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="The configuration file.")] = Path("ingot.toml"),
    against: Annotated[
        Path | None,
        typer.Option(help="Another configuration file: list the changes from it, and whether a server must restart."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a configuration file with the environment variables, and list all problems; exit code 1 if there are any.

    Models and the files that settings name are not opened.

    Examples:

        ingot config check
        ingot config check new.toml --against ingot.toml
    """
    from ingot.config.changes import changes
    from ingot.config.configuration import Configuration

    old = None if against is None else Configuration.of({}, against)
    try:
        found = Configuration.of({}, file)
    except InvalidArgument as error:
        problems = [*getattr(error, "problems", (str(error),))]
        if as_json:
            print_json({"ok": False, "problems": problems})
        for problem in problems if not as_json else ():
            say(problem)
        raise typer.Exit(1) from None
    differences = None if old is None else changes(old, found)
    if as_json:
        counts = {"models": len(found.models), "pipelines": len(found.pipelines)}
        print_json({"ok": True, **counts, **_described(differences)})
        return
    settings = [value for value in found.given.values() if value.place]
    counted = [_counted(settings, "setting"), _counted(found.models, "model")]
    counted += [_counted(found.pipelines, "pipeline")] if found.pipelines else []
    say(f"{file}: ok, {', '.join(counted[:-1])} and {counted[-1]}")
    for line in differences.lines if differences is not None else ():
        say(line)


@config.command()
@with_settings
def show(file: ConfigOption = None, as_json: Json = False, **settings: Any) -> None:
    """Show every setting that ingot serve would have with the same options, and where its value comes from.

    Examples:

        ingot config show --config ingot.toml --http-port 9000
    """
    from ingot.config.configuration import Configuration

    found = Configuration.of(chosen(settings), file, options=True)
    if as_json:
        print_json(_shown(found))
        return
    known, values = ServerConfig.settings(), _values(found.server, found.given, "default")
    width = max(map(len, known))
    texts = {name: known[name].shown(getattr(found.server, name)) for name in known}
    column = max(len(text) for text in texts.values() if len(text) < 40)
    for name, text in texts.items():
        say(f"{name:{width}}  {text:{column}}  {values[name]['from']}")
    for model in found.models:
        say(f"\nmodel {model.address}  {model.place}")
        for name, own in model.given.items():
            say(f"{name:{width}}  {known[name].shown(own.value):{column}}  {own.origin}")


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of the configuration file, for editors.

    Examples:

        ingot config schema > ingot.schema.json
    """
    from ingot.config.file import schema

    print(json.dumps(schema(), indent=2))


def _described(differences: Changes | None) -> dict[str, Any]:
    if differences is None:
        return {}
    return {
        kind: [text for each, _, text in (line.partition(": ") for line in differences.lines) if each == kind]
        for kind in ("live", "restart")
    }


def _shown(found: Configuration) -> dict[str, Any]:
    models = []
    for model in found.models:
        own = _values(model.config(found.server), model.given, "server")
        models.append(
            {
                "name": model.name,
                "source": model.source,
                "settings": {name: value for name, value in own.items() if ServerConfig.settings()[name].per_model},
            }
        )
    return {"settings": _values(found.server, found.given, "default"), "models": models}


def _values(config: ServerConfig, given: Mapping[str, Given], otherwise: str) -> dict[str, Any]:
    return {
        name: {"value": value, "from": given[name].origin if name in given else otherwise}
        for name, value in config.content.items()
    }


def _counted(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
