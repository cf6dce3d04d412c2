"""``ingot list``, ``history``, ``promote``, ``rollback`` and ``remove``: what is called what, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives import Json, StoreOption
from ingot.cli.output import note, print_json, say
from ingot.cli.transfers import Expect
from ingot.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from ingot.model_store import Reference
    from ingot.model_store.places import Place

Alias = Annotated[str, typer.Argument(help="The tag to move, such as prod.")]


def list_models(
    where: Annotated[
        str | None,
        typer.Argument(help="A model's name, oci://host or oci://host/name.", show_default="all of the store"),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """List the models and tags of the store or of a registry."""
    place, names = _listed(where, store)
    rows = [(name, tag, digest) for name in names for tag, digest in place.tags(name).items()]
    if as_json:
        print_json([{"name": name, "tag": tag, "digest": digest} for name, tag, digest in rows])
        return
    for name, tag, digest in rows:
        say(f"{name}:{tag}  {digest}")
    if not rows:
        note(f"{where or 'the store'} holds no models; ingot push fills it")


def history(
    model: Annotated[str, typer.Argument(help="A model's name, or name:tag.")],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Show what the tags of a model pointed to, when, and by whom; the newest move first."""
    from ingot.model_store import Reference, Store

    ref = Reference.parse(model)
    if ref.registry is not None:
        raise InvalidArgument("registries keep no history of tags; ingot list shows what there is now")
    moves = [move for move in Store(store).history(ref.name) if ref.tag in (None, move.tag)][::-1]
    if not moves:
        raise NotFound(f"the store knows nothing of '{model}'; ingot history {ref.name} shows its other tags")
    if as_json:
        print_json([move.model_dump(mode="json") for move in moves])
        return
    for move in moves:
        moment = move.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        say(f"{moment}  {move.action:<8}  {ref.name}:{move.tag}  {move.new or 'removed'}  {move.by}".rstrip())


def promote(
    reference: Annotated[str, typer.Argument(help="What: name:tag, in the store or a registry.")],
    alias: Alias,
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Point an alias of a model, such as prod, at one of its archives."""
    from ingot.model_store import Store
    from ingot.model_store.places import open_place
    from ingot.model_store.tags import ANY

    place, ref = open_place(reference, Store(store))
    before = place.digest_of(ref.name, alias)
    _print_move(place.promote(ref, alias, expect=expect or ANY), before, as_json)


def rollback(
    reference: Annotated[str, typer.Argument(help="The alias: name:tag, such as digits:prod.")],
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Point an alias at what it pointed to before. Once more goes one further back; a removed tag comes back."""
    from ingot.model_store import Reference, Store
    from ingot.model_store.tags import ANY

    ref = Reference.parse(reference)
    if ref.registry is not None:
        raise InvalidArgument(
            "registries keep no history of tags; promote a version instead: "
            f"ingot promote {ref.registry}/{ref.name}:VERSION {ref.tag or 'prod'}"
        )
    place = Store(store)
    before = None if ref.tag is None else place.digest_of(ref.name, ref.tag)
    _print_move(place.rollback(ref, expect=expect or ANY), before, as_json)


def remove(
    reference: Annotated[str, typer.Argument(help="The tag: name:tag, in the store or a registry.")],
    expect: Expect = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Remove a tag. In the store its archive stays for a day at least: ingot rollback brings it back."""
    from ingot.model_store import Store
    from ingot.model_store.places import open_place
    from ingot.model_store.tags import ANY

    place, ref = open_place(reference, Store(store))
    removed = place.remove(ref, expect=expect or ANY)
    if as_json:
        print_json({"name": removed.name, "tag": removed.tag, "digest": None, "before": removed.digest})
    else:
        say(f"{removed.name}:{removed.tag} removed, was {removed.digest}")


def _listed(where: str | None, store: Path | None) -> tuple[Place, list[str]]:
    from ingot.model_store import Store
    from ingot.model_store.places import open_place

    place: Place = Store(store)
    if where is None:
        return place, place.names()
    if "://" in where and where.partition("://")[2].count("/") == where.endswith("/"):
        place, _ = open_place(f"{where.rstrip('/')}/any", Store(store))
        return place, place.names()
    place, ref = open_place(where, Store(store))
    if ref.tag or ref.digest or ref.variant:
        raise InvalidArgument(f"'{where}' is one archive; ingot inspect shows it, and ingot list takes a model's name")
    if not place.tags(ref.name):
        raise NotFound(f"there is no model '{where}'; ingot list shows what there is")
    return place, [ref.name]


def _print_move(moved: Reference, before: str | None, as_json: bool) -> None:
    if as_json:
        print_json({"name": moved.name, "tag": moved.tag, "digest": moved.digest, "before": before})
        return
    was = "is that already" if before == moved.digest else f"was {before}" if before else "is new"
    say(f"{moved.name}:{moved.tag}  {moved.digest}")
    note(f"{moved.name}:{moved.tag} {was}")
