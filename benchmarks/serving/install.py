"""Installs the load generators, each peer into its own environment, and a compiled wheel of this tree.

``python -m benchmarks.serving.install [NAMES]``. A contestant that cannot be installed here is reported and left out of
the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.serving.contestants import PEERS, ROOT, CompiledIngot, Peer, contestants, installed, mark
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
    if not (why := _failure([*pip, *given])):
        mark(build, peer).write_bytes(peer.pins)
    return why


def compile_wheel(server: CompiledIngot, build: Path) -> str:
    """Build and install the compiled wheel, as ``make wheel-compiled`` builds it; return the reason if that fails."""
    if not server.missing(build):
        return ""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    folder = server.site(build)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        why = _failure([*pip, "wheel", "--no-deps", "-w", work, str(ROOT)], {"INGOT_COMPILE": "1"})
        wheels = [str(path) for path in Path(work).glob("*.whl")]
        return why or _failure([*pip, "install", "--no-deps", "--target", str(folder), *wheels])


def _failure(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run pip; return the last line of its errors if it fails."""
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
    return lines[-1] if result.returncode else ""


def main() -> None:
    """Install the named contestants, or everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.install")
    installable = {
        name: one
        for name, one in contestants().items()
        if isinstance(one, CompiledIngot) or (isinstance(one, Peer) and one.requirements.exists())
    }
    parser.add_argument("names", nargs="*", choices=[*installable, []], help="all, if none is named")
    parser.add_argument("--build", type=Path, default=Path("build/serving"))
    options = parser.parse_args()
    if why := tools():
        print(f"load generators: {why}")
    for name in options.names or installable:
        one, build = installable[name], options.build.absolute()
        why = compile_wheel(one, build) if isinstance(one, CompiledIngot) else install(one, build)
        print(f"{name}: {why or 'installed'}", flush=True)


if __name__ == "__main__":
    main()
