"""``ingot server``: a running server, and the API keys of servers."""

from __future__ import annotations

import typer

from ingot.cli.server import control, keys, top

server = typer.Typer(
    help="Control a running server over its management listener; create the API keys of servers.", no_args_is_help=True
)
for _command in (control.status, control.reload, control.load, control.unload, control.canary, control.shadow, top.top):
    server.command()(_command)
server.add_typer(keys.keys, name="keys")
