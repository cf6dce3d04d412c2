"""``ingot trust``: keys that sign archives, signatures and their verification."""

from __future__ import annotations

import typer

from ingot.cli.trust import signing

trust = typer.Typer(help="Sign archives, and check who signed them.", no_args_is_help=True)
for _command in (signing.keygen, signing.sign, signing.verify):
    trust.command()(_command)
