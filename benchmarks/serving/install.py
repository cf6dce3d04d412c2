"""Installs the load generators, and each peer into its own environment.

``python -m benchmarks.serving.install [NAMES]``. A peer that cannot be installed here is reported and left out of the
run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.serving.contestants import PEERS, Peer, contestants, installed, mark
from benchmarks.serving.loads import missing_tools

_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client", "taskset": "util-linux"}


def tools() -> str:
    """Install Debian's packages of the load generators; return why they are not there, if so."""
    packages = [_PACKAGES[tool] for tool in missing_tools()]
    if packages and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], check=False)
    return f"{', '.join(missing)} missing" if (missing := missing_tools()) else ""


def install(peer: Peer, build: Path) -> str:
    """Make one peer's environment; return the reason if that fails.

    Args:
        peer: one with requirements.
        build: the benchmark's folder for generated files.
    """
    folder = build / "envs" / peer.name
    if installed(build, peer):
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    given = ["-c", str(PEERS / "constraints.txt"), "-r", str(peer.requirements)]
    result = subprocess.run([*pip, *given], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        return lines[-1]
    mark(build, peer).write_bytes(peer.pins)
    return ""


def main() -> None:
    """Install the named peers, or everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.install")
    peers = {
        name: peer for name, peer in contestants().items() if isinstance(peer, Peer) and peer.requirements.exists()
    }
    parser.add_argument("names", nargs="*", choices=[*peers, []], help="all, if none is named")
    parser.add_argument("--build", type=Path, default=Path("build/serving"))
    options = parser.parse_args()
    if why := tools():
        print(f"load generators: {why}")
    for name in options.names or peers:
        why = install(peers[name], options.build.absolute())
        print(f"{name}: {why or 'installed'}", flush=True)


if __name__ == "__main__":
    main()
