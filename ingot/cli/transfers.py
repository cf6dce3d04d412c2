"""``ingot push``, ``pull``, ``copy``, ``save`` and ``load``: copies of archives between places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli import interrupts
from ingot.cli.archives import Json, StoreOption, check_apart, check_out, note_stored
from ingot.cli.output import end, note, print_json, say, size, stderr
from ingot.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

    from ingot.model_store import Archive, Reference, Store
    from ingot.model_store.blobs.transfer import Transfer
    from ingot.model_store.places import Located

# Bytes of the smallest transfer that is reported as lines.
_LARGE = 256 << 20

Expect = Annotated[
    str | None, typer.Option(help="The digest that the tag must have now, or none for a new tag.", show_default="any")
]
Trust = Annotated[
    Path | None,
    typer.Option("--trust", envvar="INGOT_TRUST", help="A trust policy that the archive must satisfy."),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk-mb", min=1, help="Upload in chunks of this many MiB.", show_default="each blob in one request"
    ),
]


def push(
    archive: Annotated[str, typer.Argument(help="An archive file, or a reference.")],
    reference: Annotated[str, typer.Argument(help="The target: name:tag, or oci://host/name:tag.")],
    expect: Expect = None,
    chunk_mb: Chunk = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive into the store or a registry. A version (a tag such as 1, v2 or 1.3) can be pushed once."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    here, target = Store(store), _target(reference)
    located, wanted = locate(archive, here).whole(), expected(expect)
    source, found = located.find()
    _check(source, found, target, located, trust)
    _copy(source, target, here, wanted, as_json, chunk_mb, recheck=trust is not None)


def pull(
    reference: Annotated[str, typer.Argument(help="The archive: oci://host/name:tag.")],
    name: Annotated[
        str | None, typer.Argument(help="The name in the store: name:tag.", show_default="the registry's")
    ] = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive from a registry into the store. An interrupted pull continues."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    here = Store(store)
    source = locate(reference, here).whole()
    if source.reference is None or source.reference.registry is None:
        raise InvalidArgument(f"'{reference}' names no registry; write oci://host/{reference}")
    target = None if name is None else _local_target(name, f"ingot copy {reference} {name}")
    archive, found = source.find()
    if target is None and found.tag is None:
        raise InvalidArgument(f"no tag points to '{found}'; give its name in the store, such as {found.name}:1")
    target = target or _target(f"{found.name}:{found.tag}")
    _check(archive, found, target, source, trust)
    _copy(archive, target, here, expected(None), as_json, recheck=trust is not None)


def copy(
    source: Annotated[str, typer.Argument(help="The archive: a reference in the store or a registry, or a file.")],
    target: Annotated[str, typer.Argument(help="The target: name:tag, or oci://host/name:tag.")],
    expect: Expect = None,
    chunk_mb: Chunk = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive, with its signatures, between names, stores and registries."""
    push(source, target, expect, chunk_mb, trust, store, as_json)


def save(
    reference: Annotated[str, typer.Argument(help="The archive: a reference in the store or a registry.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The archive file to write.")],
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Write an archive of the store or of a registry, with its signatures, as one file."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    check_out(out)
    check_apart(out, archive=reference)
    located = locate(reference, Store(store)).whole()
    archive, found = located.find()
    _check(archive, found, None, located, trust)
    try:
        with transferring(f"Writing {out.name}") as transfer:
            archive.save(out, transfer)
    except KeyboardInterrupt:
        note(f"nothing was written to {out}")
        raise
    if as_json:
        print_json({"file": str(out), "digest": archive.digest, "size": out.stat().st_size})
    else:
        say(f"{out}: {archive.name}, {size(out.stat().st_size)}  {archive.digest}")


def load(
    file: Annotated[str, typer.Argument(help="The archive file, or its address in object storage: s3://bucket/FILE.")],
    reference: Annotated[
        str | None, typer.Argument(help="The target: name:tag.", show_default="its name, and the next free version")
    ] = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive file into the store under its own name. An archive that the store already has keeps its tag."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate_file

    here, located = Store(store), locate_file(file).whole()
    given = None if reference is None else _local_target(reference, f"ingot push {file} {reference}")
    archive, found = located.find()
    if given is None:
        held = [tag for tag, digest in here.tags(archive.name).items() if digest == archive.digest]
        given = _target(f"{archive.name}:{held[0] if held else here.next_version(archive.name)}")
    _check(archive, found, given, located, trust)
    _copy(archive, given, here, expected(None), as_json, recheck=trust is not None)


def expected(expect: str | None) -> str:
    """Return the digest that ``--expect`` requires.

    Raises:
        InvalidArgument: it is not a digest, or is empty, for instance from a variable that a failed command did not
        set.
    """
    from ingot.model_store.store.tags import ANY, NONE

    if expect is None:
        return ANY
    if expect != NONE and re.fullmatch(r"sha256:[0-9a-f]{64}", expect) is None:
        raise InvalidArgument(
            f"--expect is '{expect}', which is not a digest; give sha256: and 64 hex digits, or none for a new tag"
        )
    return expect


@contextmanager
def transferring(title: str, *, log: bool = False) -> Iterator[Transfer]:
    """Show a transfer's progress, rate and remaining time on stderr; if it is not a terminal, large ones as lines.

    Args:
        title: what is transferred.
        log: if stderr is not a terminal, begin with the title as a line.
    """
    from rich.progress import Progress

    from ingot.model_store.blobs.transfer import Transfer

    if not stderr().is_terminal:
        if log:
            note(title)
        yield Transfer(_lines(title))
        return
    with (
        Progress(*_columns(), console=stderr(), transient=True) as bar,
        interrupts.displayed(lambda text: end(bar, text)),
    ):
        task = bar.add_task(title, total=None, visible=False)

        def show(state: Transfer) -> None:
            # Blobs that are already present count neither as done nor as remaining: the rate would be far too high.
            left = state.total - state.skipped
            bar.update(task, total=left, completed=state.moved, visible=state.moved > 0)

        yield Transfer(show)


def _lines(title: str) -> Callable[[Transfer], None]:
    """Return a report of a large transfer as lines, one for each tenth of its bytes."""
    shown = 0

    def show(state: Transfer) -> None:
        nonlocal shown
        total = state.total - state.skipped
        if total >= _LARGE and (tenths := 10 * state.moved // total) > shown:
            shown = tenths
            note(f"{title}: {size(state.moved)} of {size(total)}")

    return show


def _columns() -> list[ProgressColumn]:
    """Return the columns of a transfer's progress bar. Their classes derive from rich's, which is imported late."""
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            total = "?" if task.total is None else size(int(task.total))
            return Text(f"{size(int(task.completed))} of {total}", style="progress.download")

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{size(int(speed))}/s", style="progress.data.speed")

    return [TextColumn("{task.description}", markup=False), BarColumn(), Amount(), Rate(), TimeRemainingColumn()]


def _check(archive: Archive, found: Reference, target: Reference | None, located: Located, trust: Path | None) -> None:
    """Raise Untrusted if a trust policy is given and forbids copying an archive; see Policy.check_copy."""
    if trust is not None:
        from ingot.model_store.trust.policy import Policy

        Policy.load(trust).check_copy(archive, found, target, file="" if located.place else located.name)


def _copy(
    archive: Archive,
    target: Reference,
    store: Store,
    expect: str,
    as_json: bool,
    chunk_mb: int | None = None,
    *,
    recheck: bool,
) -> None:
    """Push an archive into the store, or the registry that ``target`` names, and report it."""
    from ingot.model_store.places import open_place

    place, target = open_place(target, store, chunk_mb << 20 if chunk_mb else None)
    try:
        with transferring("Copying") as transfer:
            if place is store:
                pushed = store.push(archive, target, expect=expect, transfer=transfer, recheck=recheck)
            else:
                pushed = place.push(archive, target, expect=expect, transfer=transfer)
    except KeyboardInterrupt:
        again = "continues this one" if place is store else "skips blobs that were sent completely"
        note(f"no tag was moved, and the same command {again}")
        raise
    if as_json:
        result = {"reference": str(target), "digest": pushed.digest, "size": archive.size}
        print_json({**result, "moved": transfer.moved, "present": transfer.skipped})
        return
    say(f"{target}  {pushed.digest}")
    if transfer.skipped:
        note(f"{size(transfer.moved)} copied, {size(transfer.skipped)} were already present")


def _target(reference: str) -> Reference:
    from ingot.model_store import Reference
    from ingot.model_store.places import is_file
    from ingot.model_store.references import PULLED, written_name

    if is_file(reference):
        raise InvalidArgument(f"'{reference}' is a file; ingot save writes one, and this command expects name:tag")
    ref = Reference.parse(reference)
    if not ref.pushable:
        raise InvalidArgument(f"an archive cannot become '{reference}'; write name:tag, such as {ref.name}:1")
    if ref.registry is None and ref.name.startswith(f"{PULLED}/"):
        raise InvalidArgument(
            f"'{reference}': names in {PULLED}/ are reserved for archives that servers pull; choose another"
        )
    note_stored(written_name(reference))
    return ref


def _local_target(reference: str, instead: str) -> Reference:
    """Return the reference of an archive in the store.

    Raises:
        InvalidArgument: it is in a registry, where another command copies to.
    """
    target = _target(reference)
    if target.registry is not None:
        raise InvalidArgument(f"'{reference}' is in a registry, and this command copies into the store; try: {instead}")
    return target
