"""``ingot store``: the tags of the store and of registries, and the store's files."""

from __future__ import annotations

import typer

from ingot.cli.store import maintenance, tags

store = typer.Typer(
    help="List and move the tags of archives; check the store and free space in it.", no_args_is_help=True
)
store.command("list")(tags.list_models)
for _command in (tags.history, tags.promote, tags.rollback, tags.remove, maintenance.fsck, maintenance.gc):
    store.command()(_command)
