"""``ingot store fsck`` and ``gc``: check the store, and free space in it."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives.transfers import transferring
from ingot.cli.options import Json, StoreOption
from ingot.cli.output import note, print_json, progress, say, size
from ingot.errors import InvalidArgument, NotFound
from ingot.report import units

if TYPE_CHECKING:
    from ingot.model_store import Store


def fsck(
    quick: Annotated[
        bool, typer.Option("--quick", help="Check only names, sizes and documents, without reading blobs.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged blobs aside, so that a copy of the archives restores them.")
    ] = False,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Check that every archive of the store is complete. The exit code is 1 if there are problems.

    Each line names a problem and the archives that it affects. The store can be used meanwhile.

    Examples:

        ingot store fsck
        ingot store fsck --repair
    """
    from ingot.model_store.store.fsck import check

    if quick and repair:
        raise InvalidArgument("--repair must read the blobs; leave out --quick")
    here = _existing(store)
    with transferring("Reading") as transfer:
        checked = check(here, quick=quick, repair=repair, transfer=transfer)
    if as_json:
        problems = [asdict(problem) for problem in checked.problems]
        print_json({"archives": checked.archives, "blobs": checked.blobs, "read": checked.size, "problems": problems})
    else:
        for problem in checked.problems:
            users = f"; needed by {', '.join(problem.needed_by)}" if problem.needed_by else ""
            done = "; put aside" if problem.repaired else ""
            say(f"{problem.kind} {problem.subject}: {problem.detail}{users}{done}")
        say(f"{checked.archives} archives, {checked.blobs} blobs: {_verdict(len(checked.problems))}")
    if checked.problems:
        note("copy these archives into the store again to restore blobs; move damaged ones aside first (--repair)")
        raise typer.Exit(1)


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")
    ] = False,
    grace: Annotated[
        str, typer.Option(help="Keep blobs that were written or had a tag within this time: 30s, 90m, 24h or 7d.")
    ] = "24h",
    keep: Annotated[int, typer.Option(min=0, help="Number of earlier targets of an alias to keep, for rollback.")] = 10,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Remove blobs from the store that no current or recent tag needs.

    Copies into the store and readers are not blocked.

    Examples:

        ingot store gc --dry-run
        ingot store gc --grace 1h
    """
    from ingot.model_store.store.gc import collect

    here = _existing(store)
    with progress("Collecting"):
        found = collect(here, grace=_span(grace), keep_moves=keep, dry_run=dry_run)
    if as_json:
        files = [str(path) for path in found.files]
        waiting = {"files": found.waiting, "size": found.waiting_size}
        print_json({"files": files, "size": found.size, "kept": found.kept, "waiting": waiting, "dry_run": dry_run})
        return
    for path in found.files if dry_run else ():
        say(str(path))
    done = "would be" if dry_run else "were"
    say(f"{len(found.files)} files, {size(found.size)} {done} removed; {found.kept} blobs stay")
    if found.waiting:
        say(
            f"{found.waiting} files, {size(found.waiting_size)} are unused and will be removed after the grace "
            f"period ({grace})"
        )


def _existing(store: Path | None) -> Store:
    """Return the store, which must be there if it was named.

    Raises:
        NotFound: a folder was named, by --store or INGOT_HOME, and does not exist: it is probably misspelt.
    """
    from ingot.model_store import Store

    here = Store(store)
    if not os.path.lexists(here.root):
        if store is not None or os.environ.get("INGOT_HOME"):
            named = "--store" if store is not None else "INGOT_HOME"
            raise NotFound(f"there is no store at {here.root}, which {named} names; check the spelling")
        note(f"there is no store at {here.root} yet")
    return here


def _verdict(problems: int) -> str:
    return "no problems" if not problems else "1 problem" if problems == 1 else f"{problems} problems"


def _span(text: str) -> timedelta:
    span = units.span(text)
    if span is None:
        raise InvalidArgument(f"--grace '{text}' is not a duration; write it as 30s, 90m, 24h or 7d")
    return span
