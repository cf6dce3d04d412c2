"""Runs the blocks of a page as one script, in the order of the page.

A ``bash`` block is run; a block with a title, such as ``python title="model.py"``, is written to the file of that name.
The usual ports (8000, 8001, and 8080, 8081 of a proxy) become free ones. Other blocks are only shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.serving.processes import free_ports
from tests.support import ROOT

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"(?:(?<=localhost:)|(?<=127\.0\.0\.1:)|(?<=--port ))80[08][01]\b")
_HEAD = "set -e -o pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"


def script(text: str) -> str:
    """Return the blocks of a page as a shell script."""
    parts = []
    for language, title, block in _BLOCK.findall(text):
        if title:
            parts.append(f"cat > {title} <<'END_OF_FILE'\n{block}END_OF_FILE\n")
        elif language == "bash":
            parts.append(block)
    return "".join(parts)


def run(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page in a folder, with its store in ``folder/home``."""
    lines = script(text)
    assert lines, "a page without commands"
    ports = dict(zip(("8000", "8001", "8080", "8081"), map(str, free_ports(4)), strict=True))
    lines = _PORT.sub(lambda found: ports[found[0]], lines)
    served = {"INGOT_HTTP_PORT": ports["8000"], "INGOT_GRPC_PORT": ports["8001"]} if "ingot serve" in lines else {}
    if "--torchserve" in lines:
        served["INGOT_TORCHSERVE_PORTS"] = f"{ports['8080']},{ports['8081']},0,0,0"
    return subprocess.run(
        ["bash", "-c", _HEAD + lines],
        cwd=folder,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("INGOT_")},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "INGOT_HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder),
            **served,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
