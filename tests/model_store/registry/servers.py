"""Real registries on this machine: Debian's docker-registry."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

USER, PASSWORD = "ann", "correct horse"
# htpasswd -nbBC 4 ann 'correct horse': of low cost, as the registry computes it for each request.
HTPASSWD = f"{USER}:$2y$04$cEfGy1FWPBbGgCLhKR0aq.MV1OAkFFkuOZfNQM2l/V7dL/Mrw3DAK\n"

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: {delete}}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
http: {{addr: 127.0.0.1:{port}, secret: not one}}
"""


@contextlib.contextmanager
def docker_registry(program: str, folder: Path, *, htpasswd: str = "", delete: bool = True) -> Iterator[int]:
    """Run a registry and yield its port."""
    port = free_port()
    config = _CONFIG.format(root=folder / "data", port=port, delete=str(delete).lower())
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        config += f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}\n"
    (folder / "config.yml").write_text(config)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"no registry came up on port {port}")
