"""``ingot fleet``: one version for all replicas of a model."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.archives import Json, StoreOption
from ingot.cli.connection import CaOption, api_key
from ingot.cli.ctl import KeyOption
from ingot.cli.output import note, print_json, say, seconds
from ingot.errors import InvalidArgument, NotFound, Unavailable
from ingot.server.clients.management import Management

if TYPE_CHECKING:
    from ingot.deploy.fleet import Roll, Version
    from ingot.model_store.places import Place

fleet = typer.Typer(help="Change the version of a model on all its replicas.", no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(help="The model with the alias that its replicas follow: oci://host/team/digits:prod.")
]
Servers = Annotated[
    list[str],
    typer.Option("--server", help="A replica's management listener, as for ingot ctl; once for each replica."),
]
Called = Annotated[
    str | None, typer.Option("--model", help="The model's name for clients.", show_default="the last part of the name")
]


@fleet.command()
def status(
    model: Model,
    server: Servers,
    called: Called = None,
    key_file: KeyOption = None,
    ca_file: CaOption = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Show which archive each replica serves; exit code 1 if one is not ready or differs from the alias."""
    from ingot.deploy.fleet import look

    place, name, alias = _alias(model, store)
    tags = place.tags(name)
    if alias not in tags:
        raise NotFound(f"there is no '{model}'")
    found = asyncio.run(look(_servers(server, key_file, ca_file), _served(name, called, alias)))
    same = all(each.ready and each.digest == tags[alias] for each in found)
    if as_json:
        shown = [{"server": each.place, "state": each.state, "digest": each.digest} for each in found]
        print_json({"alias": tags[alias], "same": same, "replicas": shown})
    else:
        say(f"{alias}  {_tagged(tags, tags[alias], alias)}")
        for each in found:
            tried = each.trial["digest"] if each.trial and each.trial["state"] == "running" else ""
            trial = f"  tries {_tagged(tags, tried, alias)}" if tried else ""
            ahead = "  ahead of the alias" if each.ahead else ""
            say(f"{each.place}  {each.state}  {_tagged(tags, each.digest, alias)}{ahead}{trial}")
    if not same:
        raise typer.Exit(1)


@fleet.command()
def roll(
    model: Model,
    version: Annotated[str, typer.Argument(help="The version that all replicas are to serve: 3.")],
    server: Servers,
    called: Called = None,
    max_unavailable: Annotated[
        int, typer.Option(min=1, help="Replicas that are changed at once, less those that are not ready.")
    ] = 1,
    pause: Annotated[str, typer.Option(help="How long the changed replicas are watched before the next.")] = "10s",
    timeout: Annotated[str, typer.Option(help="How long the change of one replica may take.")] = "10m",
    canary: Annotated[
        str | None,
        typer.Option(help="Percentages, step by step, that the version gets on each replica before it takes over."),
    ] = None,
    every: Annotated[str | None, typer.Option(help="With --canary: how long a step takes at least.")] = None,
    errors: Annotated[float | None, typer.Option(help="Percent of its requests that a replica may fail.")] = None,
    drift: Annotated[
        float | None, typer.Option(help="With --canary: percent of compared answers that may differ.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="With --canary: highest ratio of its p99 latency to the earlier version's.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="With --canary: largest error of an answer that does not differ, as a share."),
    ] = None,
    compare: Annotated[
        float | None, typer.Option(help="With --canary: percent of the requests that both versions answer.")
    ] = None,
    key_file: KeyOption = None,
    ca_file: CaOption = None,
    store: StoreOption = None,
) -> None:
    """Let all replicas serve a version, some at a time, then move the alias to it.

    If a replica fails it, or its answers drift, all replicas return to what the alias means. Ctrl-C stops between two
    replicas; the same command continues.
    """
    from ingot.deploy.fleet import Policy, Roll
    from ingot.model_store import Reference

    limits = {"every": every, "drift": drift, "latency": latency, "tolerance": tolerance, "compare": compare}
    given = {label: value for label, value in limits.items() if value is not None}
    if given and canary is None:
        raise InvalidArgument(f"--{next(iter(given))} is for a canary; add --canary 10,50")
    if errors is not None:
        given["errors"] = errors
    policy = Policy(
        max_unavailable=max_unavailable,
        pause=seconds("--pause", pause),
        timeout=seconds("--timeout", timeout),
        canary=None if canary is None else {"steps": canary, **given},
        errors=errors,
    )
    place, name, alias = _alias(model, store)
    what = _version(place, name, alias, version, _served(name, called, alias))
    servers = _servers(server, key_file, ca_file)

    def made(stop: asyncio.Event) -> Roll:
        return Roll(servers=servers, what=what, policy=policy, move=move, say=say, stop=stop)

    def move() -> None:
        if what.digest != what.before:
            place.promote(Reference.parse(f"{model.rpartition(':')[0]}:{version}"), alias, expect=what.before)

    try:
        asyncio.run(_interruptible(made))
    except Unavailable as error:
        raise type(error)(f"{error}. '{model}' was not moved") from error
    say(f"all {len(servers)} replicas run version {version}, and '{alias}' means it")


async def _interruptible(made: Callable[[asyncio.Event], Roll]) -> None:
    """Run a roll; the first Ctrl-C or SIGTERM stops it between two replicas, and the second at once."""
    from ingot.deploy.fleet import Interrupted, look

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    roll = made(stop)
    running = asyncio.create_task(roll.run())

    def interrupt() -> None:
        if stop.is_set():
            running.cancel()
            return
        note("stopping after the replicas that are changing now; Ctrl-C again leaves them as they are")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await running
    except (Interrupted, asyncio.CancelledError):
        found = await look(roll.servers, roll.what.model)
        changed = [each.place for each in found if each.digest == roll.what.digest]
        note(
            f"stopped: {len(changed)} of {len(found)} replicas run version {roll.what.version}. They stay ahead of the "
            "alias, which was not moved: the same command continues, and a roll to the alias's version goes back"
        )
        raise typer.Exit(130) from None


def _alias(model: str, store: Path | None) -> tuple[Place, str, str]:
    """Return the place of a model, its name there and the alias.

    Raises:
        InvalidArgument: no alias is named.
    """
    from ingot.model_store import Store
    from ingot.model_store.places import open_place
    from ingot.model_store.references import is_version

    place, reference = open_place(model, Store(store))
    if reference.tag is None or reference.digest is not None or is_version(reference.tag):
        raise InvalidArgument(f"'{model}' names no alias; name the one that the replicas follow, such as digits:prod")
    return place, reference.name, reference.tag


def _version(place: Place, name: str, alias: str, version: str, served: str) -> Version:
    from ingot.deploy.fleet import Version
    from ingot.model_store.references import is_version

    if not is_version(version):
        raise InvalidArgument(f"'{version}' is not a version, such as 2 or 1.4.0; only versions never change")
    before, digest = place.digest_of(name, alias), place.digest_of(name, version)
    for tag, there in ((alias, before), (version, digest)):
        if there is None:
            raise NotFound(f"'{name}' has no tag '{tag}'")
    return Version(model=served, version=version, digest=digest or "", before=before or "")


def _served(name: str, called: str | None, alias: str) -> str:
    return f"{called or name.rpartition('/')[2]}:{alias}"


def _servers(places: list[str], key_file: Path | None, ca_file: Path | None) -> list[Management]:
    if len({*places}) < len(places):
        raise InvalidArgument("a replica is named twice by --server")
    key = api_key(key_file)
    return [Management(place, key, ca_file) for place in places]


def _tagged(tags: Any, digest: str, alias: str) -> str:
    """Return a digest, shortened, with the tag that has it."""
    tag = next((f" = {tag}" for tag, there in tags.items() if there == digest and tag != alias), "")
    return f"{digest[:19]}{tag}"
