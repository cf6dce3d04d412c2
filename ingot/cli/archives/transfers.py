"""``ingot copy``: copies of archives between files, the store and registries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli import interrupts
from ingot.cli.checks import check_apart, check_out, note_stored
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption
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


def copy(
    source: Annotated[
        str,
        typer.Argument(
            help="An archive: name:tag, oci://host/name:tag, a file such as ./digits.ingot, or s3://bucket/FILE.",
            autocompletion=references,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            help="name:tag, oci://host/name:tag, or a file (ends in .ingot, or begins with ., / or ~); FOLDER/ for a "
            "file NAME.ingot there.",
            show_default="the store, under the archive's own name",
            autocompletion=references,
        ),
    ] = None,
    expect: Expect = None,
    chunk_mb: Annotated[
        int | None,
        typer.Option(
            "--chunk-mb",
            min=1,
            help="Upload to a registry in chunks of this many MiB, for proxies that limit the size of a request.",
            show_default="each blob in one request",
        ),
    ] = None,
    trust: Trust = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Copy an archive, with its signatures, between files, the store and registries.

    Without TARGET the archive is copied into the store: from a registry under its name and tag there, from a file as
    the next version of the name in the file, unless the store has the archive already.

    A version (a tag such as 1, v2 or 1.3) is never overwritten; any other tag, such as prod, moves. Blobs that exist
    in the target are not copied again, but every digest of a file is checked. An interrupted copy into the store
    continues when the same command is run again. Between two names of one registry nothing is downloaded.

    Examples:

        ingot copy digits.ingot digits:1.2.0
        ingot copy digits:1.2.0 oci://registry.local:5000/team/digits:1.2.0
        ingot copy oci://registry.local:5000/team/digits:prod
        ingot copy digits:1.2.0 ./digits.ingot
    """
    from ingot.model_store import Store
    from ingot.model_store.places import is_file, locate

    here, wanted = Store(store), expected(expect)
    located = locate(source, here).whole()
    if target is not None and is_file(target):
        for option, given in (("--expect", expect), ("--chunk-mb", chunk_mb)):
            if given is not None:
                raise InvalidArgument(f"{option} is for tags, and '{target}' is a file; leave it out")
        _save(located, target, trust, as_json)
        return
    goal = None if target is None else _target(target)
    if chunk_mb is not None and (goal is None or goal.registry is None):
        raise InvalidArgument("--chunk-mb is for uploads to a registry; leave it out")
    archive, found = located.find()
    goal = goal or _own_name(located, archive, found, here)
    _check(archive, found, goal, located, trust)
    _push(archive, goal, here, wanted, as_json, chunk_mb, recheck=trust is not None)


def _own_name(located: Located, archive: Archive, found: Reference, store: Store) -> Reference:
    """Return the name in the store of an archive that is copied without a target.

    Raises:
        InvalidArgument: the archive is in the store already, or in a registry without a tag.
    """
    if located.place is None:
        held = [tag for tag, digest in store.tags(archive.name).items() if digest == archive.digest]
        return _target(f"{archive.name}:{held[0] if held else store.next_version(archive.name)}")
    if found.registry is None:
        raise InvalidArgument(
            f"'{located.name}' is in the store already; name a target: name:tag, oci://host/name:tag or ./FILE.ingot"
        )
    if found.tag is None:
        raise InvalidArgument(f"no tag points to '{found}'; give its name in the store, such as {found.name}:1")
    return _target(f"{found.name}:{found.tag}")


def _save(located: Located, target: str, trust: Path | None, as_json: bool) -> None:
    """Write an archive as one file, with its signatures.

    Raises:
        InvalidArgument: the target is not a file that can be written.
    """
    if "://" in target:
        raise InvalidArgument(f"{target} cannot be written; copy the archive to a file, and upload that")
    out = Path(target).expanduser()
    if out.suffix == ".onnx":
        raise InvalidArgument(f"{target} is written as an archive; name it {out.stem}.ingot")
    if not target.endswith("/"):
        check_out(out)
    elif not out.is_dir():
        raise InvalidArgument(f"cannot write into {target}: there is no folder {out}")
    archive, found = located.find()
    if target.endswith("/"):
        out /= f"{archive.name.rpartition('/')[2]}.ingot"
        check_out(out)
    check_apart(out, archive=located.name)
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


def _push(
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
    from ingot.model_store.references import is_version

    place, target = open_place(target, store, chunk_mb << 20 if chunk_mb else None)
    is_alias = target.tag is not None and not is_version(target.tag)
    before = place.digest_of(target.name, str(target.tag)) if is_alias else None
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
    if is_alias:
        note(earlier(replace(pushed, registry=target.registry), before, "is new"))
    if transfer.skipped:
        note(f"{size(transfer.moved)} copied, {size(transfer.skipped)} were already present")


def earlier(moved: Reference, before: str | None, otherwise: str) -> str:
    """Return a line on the earlier target of a tag; ``otherwise`` describes a tag without one."""
    was = "is unchanged" if before == moved.digest else f"was {before}" if before else otherwise
    return f"{replace(moved, digest=None)} {was}"


def _target(reference: str) -> Reference:
    from ingot.model_store import Reference
    from ingot.model_store.references import PULLED, written_name

    ref = Reference.parse(reference)
    if not ref.pushable:
        raise InvalidArgument(f"an archive cannot become '{reference}'; write name:tag, such as {ref.name}:1")
    if ref.registry is None and ref.name.startswith(f"{PULLED}/"):
        raise InvalidArgument(
            f"'{reference}': names in {PULLED}/ are reserved for archives that servers pull; choose another"
        )
    note_stored(written_name(reference))
    return ref
