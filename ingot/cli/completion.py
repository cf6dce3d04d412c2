"""Shell completion: archives, served models, and (in bash) words with colons."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

import typer

from ingot.errors import IngotError

_TIMEOUT = 2.0


def references(context: typer.Context, incomplete: str) -> list[str]:
    """Return the archives of the store, as ``name:tag``, that begin with a text."""
    from ingot.model_store import Store

    try:
        store = Store(context.params.get("store"))
        names = [name for name in store.names() if name.startswith(incomplete.partition(":")[0])]
        return [f"{name}:{tag}" for name in names for tag in store.tags(name)]
    except IngotError:
        return []


def names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the store, and their tags once the name is complete."""
    found = references(context, incomplete)
    return found if ":" in incomplete else sorted({text.partition(":")[0] for text in found})


def served(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the running server that the command's options name, as ``name`` or ``name:version``."""
    from ingot.cli.connection import Server, only_server

    given = context.params
    try:
        place = given.get("server") or only_server("--server PLACE")
        server = Server(place, given.get("key_file"), given.get("ca_file"), timeout=_TIMEOUT)
        models = server.ask("GET", "/v2/repository/status")
    except IngotError:
        return []
    versions = [f"{model['name']}:{model['version']}" for model in models]
    return versions if ":" in incomplete else sorted({version.rpartition(":")[0] for version in versions})


def words() -> list[str]:
    """Return the words of the command line to complete, in every shell; empty if the shell asks for no completion."""
    return os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()


@contextlib.contextmanager
def with_colons() -> Iterator[None]:
    """Let bash complete ``digits:1``, which it splits at the colon, and of which it replaces only the last part."""
    if os.environ.get("_INGOT_COMPLETE") != "complete_bash":
        yield
        return
    split, last = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    joined: list[str] = []
    for word in [*split, ""][: last + 1]:
        if joined and (word.startswith(":") or joined[-1].endswith(":")):
            joined[-1] += word
        else:
            joined.append(word)
    os.environ.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
    done, printed = joined[-1].rfind(":") + 1, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            print(line[done:])
