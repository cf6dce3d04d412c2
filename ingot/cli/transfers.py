"""``ingot push``, ``pull``, ``copy``, ``save`` and ``load``: bringing archives from one place to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives import Json, StoreOption, check_apart, check_out, check_trusted
from ingot.cli.output import note, print_json, say, size, stderr
from ingot.errors import InvalidArgument

if TYPE_CHECKING:
    from ingot.model_store import Archive, Reference, Store
    from ingot.model_store.transfer import Transfer

Expect = Annotated[
    str | None, typer.Option(help="The digest that the tag must have now, or none for a new tag.", show_default="any")
]
Trust = Annotated[
    Path | None,
    typer.Option("--trust", envvar="INGOT_TRUST", help="A trust policy that the archive must hold to."),
]
Chunk = Annotated[
    int | None,
    typer.Option("--chunk-mb", min=1, help="Upload in chunks of so many MiB.", show_default="each blob in one request"),
]


def push(
    archive: Annotated[str, typer.Argument(help="An archive file, or a reference.")],
    reference: Annotated[str, typer.Argument(help="Where to: name:tag, or oci://host/name:tag.")],
    expect: Expect = None,
    chunk_mb: Chunk = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive into the store or a registry. A version (a tag such as 1, v2 or 1.3) can be pushed once."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    here, target = Store(store), _target(reference)
    _copy(locate(archive, here).whole().open(), target, here, expect, as_json, chunk_mb)


def pull(
    reference: Annotated[str, typer.Argument(help="What: oci://host/name:tag.")],
    name: Annotated[
        str | None, typer.Argument(help="What the store is to call it: name:tag.", show_default="as the registry does")
    ] = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive from a registry into the store. An interrupted pull goes on where it was."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    here = Store(store)
    source = locate(reference, here).whole()
    if source.reference is None or source.reference.registry is None:
        raise InvalidArgument(f"'{reference}' names no registry; write oci://host/{reference}")
    target = None if name is None else _target(name)
    archive, found = source.find()
    check_trusted(archive, found, trust)
    if target is None and found.tag is None:
        raise InvalidArgument(f"no tag points to '{found}'; say what the store is to call it, such as {found.name}:1")
    _copy(archive, target or _target(f"{found.name}:{found.tag}"), here, None, as_json)


def copy(
    source: Annotated[str, typer.Argument(help="What: a reference, in the store or a registry, or a file.")],
    target: Annotated[str, typer.Argument(help="Where to: name:tag, or oci://host/name:tag.")],
    expect: Expect = None,
    chunk_mb: Chunk = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive, with its signatures, between names, stores and registries."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    here, to = Store(store), _target(target)
    archive, found = locate(source, here).whole().find()
    check_trusted(archive, found, trust)
    _copy(archive, to, here, expect, as_json, chunk_mb)


def save(
    reference: Annotated[str, typer.Argument(help="What: a reference, in the store or a registry.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive file to write.")],
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Write an archive of the store or of a registry, with its signatures, as one file."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    check_out(out)
    check_apart(out, archive=reference)
    archive = locate(reference, Store(store)).whole().open()
    with transferring(f"Writing {out.name}") as transfer:
        archive.save(out, transfer)
    if as_json:
        print_json({"file": str(out), "digest": archive.digest, "size": out.stat().st_size})
    else:
        say(f"{out}: {archive.name}, {size(out.stat().st_size)}  {archive.digest}")


def load(
    file: Annotated[str, typer.Argument(help="The archive file, or its address in object storage: s3://bucket/FILE.")],
    reference: Annotated[
        str | None, typer.Argument(help="Where to: name:tag.", show_default="its name, and the next free version")
    ] = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive file into the store, as what it calls itself. One that is there already keeps its tag."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate_file

    here = Store(store)
    archive, found = locate_file(file).whole().find()
    if reference is None:
        held = [tag for tag, digest in here.tags(archive.name).items() if digest == archive.digest]
        reference = f"{archive.name}:{held[0] if held else here.next_version(archive.name)}"
    target = _target(reference)
    check_trusted(archive, found, trust)
    _copy(archive, target, here, None, as_json)


@contextmanager
def transferring(title: str, *, log: bool = False) -> Iterator[Transfer]:
    """Show how far a transfer is, its rate and the time that is left, on stderr.

    Args:
        title: what is transferred.
        log: where stderr is no terminal, print the title as a line.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ingot.model_store.transfer import Transfer

    if log and not stderr.is_terminal:
        note(title)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=stderr, transient=True, disable=not stderr.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        # What is there already counts neither as done nor as to be done: the rate would be far too high.
        yield Transfer(lambda state: bar.update(task, total=state.total - state.skipped, completed=state.moved))


def _copy(
    archive: Archive, target: Reference, store: Store, expect: str | None, as_json: bool, chunk_mb: int | None = None
) -> None:
    """Push an archive into the store, or the registry that ``target`` names, and tell of it."""
    from ingot.model_store.places import open_place
    from ingot.model_store.tags import ANY

    place, target = open_place(target, store, chunk_mb << 20 if chunk_mb else None)
    try:
        with transferring("Copying") as transfer:
            pushed = place.push(archive, target, expect=expect or ANY, transfer=transfer)
    except KeyboardInterrupt:
        note("interrupted; no tag was moved, and the same command goes on where this one was")
        raise
    if as_json:
        name = f"{target.registry}/{pushed.name}" if target.registry else pushed.name
        result = {"reference": f"{name}:{pushed.tag}", "digest": pushed.digest, "size": archive.size}
        print_json({**result, "moved": transfer.moved, "present": transfer.skipped})
        return
    say(f"{pushed.name}:{pushed.tag}  {pushed.digest}")
    if transfer.skipped:
        note(f"{size(transfer.moved)} copied, {size(transfer.skipped)} were there already")


def _target(reference: str) -> Reference:
    from ingot.model_store import Reference
    from ingot.model_store.places import is_file
    from ingot.model_store.references import PULLED

    if is_file(reference):
        raise InvalidArgument(f"'{reference}' is a file; ingot save writes one, and this command takes name:tag")
    ref = Reference.parse(reference)
    if not ref.pushable:
        raise InvalidArgument(f"'{reference}' cannot be pushed to; write name:tag, such as {ref.name}:1")
    if ref.registry is None and ref.name.startswith(f"{PULLED}/"):
        raise InvalidArgument(f"'{reference}': names in {PULLED}/ are what servers pull; take another one")
    return ref
