"""``ingot server keys``: the API keys of a server."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options import Json
from ingot.cli.output import note, print_json, say
from ingot.errors import AlreadyExists, InvalidArgument, NotFound, write_error
from ingot.report import units

if TYPE_CHECKING:
    from ingot.server.access.keys import ApiKey

keys = typer.Typer(help="Create, list and revoke the API keys of a server (ingot serve --auth).", no_args_is_help=True)
KeyFile = Annotated[
    Path | None,
    typer.Option("--file", help="The file of ingot serve --auth.", show_default="INGOT_AUTH, else keys.toml"),
]


@keys.command()
def create(
    scopes: Annotated[
        list[str], typer.Option("--scope", help="What the key allows: infer, metrics or manage; repeatable.")
    ],
    name: Annotated[str, typer.Option(help="What the key is for, such as the client's name.")],
    expires: Annotated[str, typer.Option(help="When it expires from now: 12h, 90d, or never.")] = "90d",
    file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Create a key, add its hash to the file, and print the key, once.

    The file is created if there is none, readable only by its owner.

    Examples:

        ingot server keys create --scope infer --name ci > ci.key
    """
    from ingot.server.access.keys import NAME, SCOPES

    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidArgument(f"there is no scope '{scope}'; there are: {', '.join(SCOPES)}")
    if NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"'{name}' cannot be a key's name: use up to 64 letters, digits, blanks and . _ @ -, from a letter or digit"
        )
    path, now = _path(file), _now()
    token, key = _added(path, scopes, name, _expiry(expires, now), now)
    if as_json:
        print_json({"key": token, **_described(key, now), "file": str(path)})
        return
    print(token)  # not through rich, which could break the line
    until = f"until {_shown(key.expires)}" if key.expires else "without expiry"
    note(
        f"{path} has its hash: id {key.id}, {', '.join(sorted(key.scopes))}, {until}. The key is not stored and cannot "
        "be shown again"
    )


@keys.command()
def torchserve(
    out: Annotated[Path, typer.Argument(help="The token file to write.")] = Path("key_file.json"),
    expires: Annotated[str, typer.Option(help="When the keys expire from now: 12h, 90d, or never.")] = "90d",
    file: KeyFile = None,
) -> None:
    """Create a key for inference and one for management, and write both as TorchServe's token file.

    Clients that read TorchServe's key_file.json find their keys there; ingot serve --torchserve --auth keys.toml takes
    them. The file is readable only by its owner, and is not read by the server.

    Examples:

        ingot server keys torchserve key_file.json --expires 30d
    """
    path, now = _path(file), _now()
    until = _expiry(expires, now)
    content: dict[str, dict[str, str]] = {}
    try:
        with open(out, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            for name, scope in (("management", "manage"), ("inference", "infer")):
                token, _ = _added(path, [scope], f"torchserve {name}", until, now)
                content[name] = {"key": token, **({} if until is None else {"expiration time": _shown(until)})}
            stream.write(json.dumps(content, indent=2) + "\n")
    except FileExistsError as error:
        raise AlreadyExists(f"{out} exists; remove it, and revoke its keys (ingot server keys list)") from error
    except OSError as error:
        raise write_error(f"cannot write {out}", error) from error
    say(f"{out} has the keys of {path}: " + ", ".join(content))


def _added(
    path: Path, scopes: Collection[str], name: str, expires: datetime.datetime | None, now: datetime.datetime
) -> tuple[str, ApiKey]:
    """Return a new key, and what the file has of it."""
    from ingot.server.access.auth_file import add_key
    from ingot.server.access.keys import ApiKey, generate

    token, identifier, digest = generate()
    key = ApiKey(id=identifier, name=name, hash=digest, scopes=frozenset(scopes), created=now, expires=expires)
    add_key(path, key)
    return token, key


@keys.command("list")
def list_keys(file: KeyFile = None, as_json: Json = False) -> None:
    """List the keys of the file.

    Examples:

        ingot server keys list
    """
    from ingot.server.access.auth_file import AuthFile

    path, now = _path(file), _now()
    found = list(AuthFile.load(path).keys.values())
    if as_json:
        print_json([_described(key, now) for key in found])
        return
    if not found:
        note(f"{path} has no keys; ingot server keys create adds one")
    for key in found:
        until = "never expires" if key.expires is None else f"expires {_shown(key.expires)}"
        say(f"{key.id}  {key.name}  {','.join(sorted(key.scopes))}  {key.state(now)}, {until}")


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, or its name if one active key has it.")],
    file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Revoke a key; running servers refuse it within seconds.

    Examples:

        ingot server keys revoke 3f9a51c204de
    """
    from ingot.server.access.auth_file import AuthFile, revoke_key

    path, now = _path(file), _now()
    found = _find(AuthFile.load(path).keys.values(), key, path, now)
    changed = found.revoked is None
    if changed:
        revoke_key(path, found, now)
    else:
        note(f"key {found.id} ({found.name}) was revoked on {_shown(found.revoked)}")
    if as_json:
        print_json({"id": found.id, "name": found.name, "changed": changed, "file": str(path)})
    elif changed:
        say(f"{found.id}  {found.name}  revoked")


def _find(listed: Collection[ApiKey], text: str, path: Path, now: datetime.datetime) -> ApiKey:
    by_id = [key for key in listed if key.id == text]
    if by_id:
        return by_id[0]
    named = [key for key in listed if key.name == text]
    active = [key for key in named if key.state(now) == "active"] or named
    if not active:
        # The text is not repeated: it could be a key.
        raise NotFound(f"{path} has no key with this id or name; ingot server keys list shows them")
    if len(active) > 1:
        raise InvalidArgument(f"{len(active)} keys are named '{text}'; give the id: {', '.join(k.id for k in active)}")
    return active[0]


def _described(key: ApiKey, now: datetime.datetime) -> dict[str, object]:
    times = {name: _shown(when) for name in ("created", "expires", "revoked") if (when := getattr(key, name))}
    return {"id": key.id, "name": key.name, "scopes": sorted(key.scopes), "state": key.state(now), **times}


def _path(file: Path | None) -> Path:
    return (file or Path(os.environ.get("INGOT_AUTH") or "keys.toml")).expanduser()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _expiry(text: str, now: datetime.datetime) -> datetime.datetime | None:
    if text == "never":
        return None
    span = units.span(text)
    if not span:
        raise InvalidArgument(f"--expires '{text}' is not a time to come; write it as 12h, 90d or never")
    return now + span


def _shown(when: datetime.datetime | None) -> str:
    return "" if when is None else when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
