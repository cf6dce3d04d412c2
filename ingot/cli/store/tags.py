"""``ingot store list``, ``history``, ``promote``, ``rollback`` and ``remove``: names and tags of archives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives.transfers import Expect, earlier, expected
from ingot.cli.completion import names, references
from ingot.cli.options import Json, StoreOption
from ingot.cli.output import note, print_json, say
from ingot.errors import InvalidArgument, NotFound, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from ingot.model_store import Reference
    from ingot.model_store.places import Place
    from ingot.model_store.references import RegistryAddress
    from ingot.model_store.store.tags import Move

Alias = Annotated[str, typer.Argument(help="The tag to move, such as prod.")]


def list_models(
    where: Annotated[
        str | None,
        typer.Argument(
            help="A model's name, oci://host or oci://host/name.", show_default="all of the store", autocompletion=names
        ),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """List the models and tags of the store or of a registry.

    Versions come first, in numerical order, then aliases, with the version that each points to. A registry (oci://host)
    is listed if it lists its catalogue.

    Examples:

        ingot store list
        ingot store list digits
        ingot store list oci://registry.local:5000/team/digits
    """
    from ingot.model_store import Reference, Store

    place, names, registry = _listed(where, store)
    rows = [row for name in names for row in _rows(Reference(name, registry=registry), place.tags(name))]
    reasons = {name: _reasons(place.history(name)) for name in names} if isinstance(place, Store) else {}
    shown = [(ref, version, reasons.get(ref.name, {}).get(ref.tag or "", "")) for ref, version in rows]
    if as_json:
        print_json(
            [
                {**_named(ref), "digest": ref.digest, "version": version, **({"reason": reason} if reason else {})}
                for ref, version, reason in shown
            ]
        )
        return
    for ref, version, reason in shown:
        same = f"  = {version}" if version not in (None, ref.tag) else ""
        say(f"{_short(ref)}  {ref.digest}{same}" + (f"  ({reason})" if reason else ""))
    if not rows and isinstance(place, Store) and not place.root.exists():
        note(f"there is no store at {place.root} yet; ingot copy creates it")
    elif not rows:
        note(f"{where or 'the store'} holds no models; ingot copy adds one")


def history(
    model: Annotated[str, typer.Argument(help="A model's name, or name:tag.", autocompletion=names)],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Show the history of a model's tags: targets, times and users, newest first.

    Examples:

        ingot store history digits:prod
    """
    from ingot.model_store import Reference, Store

    ref = Reference.parse(model)
    if ref.registry is not None:
        raise InvalidArgument("registries keep no history of tags; ingot store list shows the current ones")
    moves = [move for move in Store(store).history(ref.name) if ref.tag in (None, move.tag)][::-1]
    if not moves:
        raise NotFound(f"the store has no history of '{model}'; ingot store history {ref.name} shows its other tags")
    if as_json:
        print_json([move.model_dump(mode="json") for move in moves])
        return
    for move in moves:
        moment = move.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        line = f"{moment}  {move.action:<8}  {ref.name}:{move.tag}  {move.new or 'removed'}  {move.by}".rstrip()
        say(f"{line}  ({move.reason})" if move.reason else line)


def promote(
    reference: Annotated[
        str, typer.Argument(help="The archive: name:tag, in the store or a registry.", autocompletion=references)
    ],
    alias: Alias,
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Point an alias of a model, such as prod, at one of its archives.

    In the store the move is atomic. Registries cannot compare and swap.

    Examples:

        ingot store promote digits:1.2.0 prod
        ingot store promote digits:1.2.0 prod --expect sha256:a216f1f0...
    """
    from ingot.model_store import Store
    from ingot.model_store.places import open_place

    wanted = expected(expect)
    place, ref = open_place(reference, Store(store))
    before = place.digest_of(ref.name, alias)
    moved = replace(place.promote(ref, alias, expect=wanted), registry=ref.registry)
    _print_move(moved, before, "is new", as_json)


def rollback(
    reference: Annotated[
        str, typer.Argument(help="The alias: name:tag, such as digits:prod.", autocompletion=references)
    ],
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Point an alias at its earlier target. Repeated calls go further back; a removed tag is restored.

    Examples:

        ingot store rollback digits:prod
    """
    from ingot.model_store import Reference, Store

    ref, wanted = Reference.parse(reference), expected(expect)
    if ref.registry is not None:
        raise InvalidArgument(
            "registries keep no history of tags; promote a version instead: "
            f"ingot store promote {ref.registry}/{ref.name}:VERSION {ref.tag or 'prod'}"
        )
    place = Store(store)
    before = None if ref.tag is None else place.digest_of(ref.name, ref.tag)
    _print_move(place.rollback(ref, expect=wanted), before, "was removed, and is restored", as_json)


def remove(
    reference: Annotated[
        str, typer.Argument(help="The tag: name:tag, in the store or a registry.", autocompletion=references)
    ],
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Remove a tag. The store keeps the archive for at least a day, and ingot store rollback can restore the tag.

    In the store a removed version can never name another archive; in a registry it can.

    Examples:

        ingot store remove digits:1.1.0
    """
    from ingot.model_store import Store
    from ingot.model_store.places import open_place

    wanted = expected(expect)
    place, ref = open_place(reference, Store(store))
    removed = replace(place.remove(ref, expect=wanted), registry=ref.registry)
    if as_json:
        print_json({**_named(removed), "digest": None, "before": removed.digest})
    else:
        say(f"{_short(removed)} removed, was {removed.digest}")


def _listed(where: str | None, store: Path | None) -> tuple[Place, list[str], RegistryAddress | None]:
    """Return the place to list, the names of the models, and the registry, if it is one."""
    from ingot.model_store import Store
    from ingot.model_store.places import open_place

    place: Place = Store(store)
    if where is None:
        return place, place.names(), None
    if "://" in where and where.partition("://")[2].count("/") == where.endswith("/"):
        place, ref = open_place(f"{where.rstrip('/')}/any", Store(store))
        return place, place.names(), ref.registry
    place, ref = open_place(where, Store(store))
    if ref.tag or ref.digest or ref.variant:
        raise InvalidArgument(
            f"'{where}' is one archive; ingot inspect shows it, and ingot store list expects a model's name"
        )
    if not place.tags(ref.name):
        raise NotFound(f"there is no model '{where}'{_others(place, ref.name)}")
    return place, [ref.name], ref.registry


def _reasons(moves: list[Move]) -> dict[str, str]:
    """Return why tags were moved to where they are, as far as that is known."""
    return {move.tag: move.reason for move in moves}


def _others(place: Place, name: str) -> str:
    """List the existing models for a message, those below a name first; empty if the place cannot list them."""
    from ingot.model_store.references import some

    try:
        names = place.names()
    except Unsupported:
        return ""
    below = [each for each in names if each.startswith(f"{name}/")]
    if below:
        return f"; below that name are: {some(below)}"
    return f"; there are: {some(names)}" if names else "; there are none yet"


def _rows(model: Reference, tags: Mapping[str, str]) -> Iterator[tuple[Reference, str | None]]:
    """Yield each tag, versions first, with the version that it points to, or None."""
    from ingot.model_store.references import is_version, version_key

    versions = sorted(filter(is_version, tags), key=version_key)
    named = {tags[version]: version for version in versions}
    for tag in (*versions, *sorted(tag for tag in tags if not is_version(tag))):
        version = tag if is_version(tag) else named.get(tags[tag])
        yield replace(model, tag=tag, digest=tags[tag]), version


def _short(reference: Reference) -> str:
    return str(replace(reference, digest=None))


def _named(reference: Reference) -> dict[str, str | None]:
    """Return a tag as data: the name with its registry, and the tag."""
    name = str(replace(reference, tag=None, digest=None))
    return {"reference": _short(reference), "name": name, "tag": reference.tag}


def _print_move(moved: Reference, before: str | None, otherwise: str, as_json: bool) -> None:
    """Report a moved tag; ``otherwise`` describes a tag without an earlier target."""
    if as_json:
        print_json({**_named(moved), "digest": moved.digest, "before": before})
        return
    say(f"{_short(moved)}  {moved.digest}")
    note(earlier(moved, before, otherwise))
