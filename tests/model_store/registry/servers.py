"""Real registries on this machine: Debian's docker-registry."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

USER, PASSWORD = "ann", "correct horse"
# htpasswd -nbBC 4 ann 'correct horse': of low cost, as the registry computes it for each request.
HTPASSWD = f"{USER}:$2y$04$cEfGy1FWPBbGgCLhKR0aq.MV1OAkFFkuOZfNQM2l/V7dL/Mrw3DAK\n"

_CONFIG = """\
version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: {delete}}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
http: {{addr: "127.0.0.1:0", secret: not one}}
"""


@contextlib.contextmanager
def docker_registry(program: str, folder: Path, *, htpasswd: str = "", delete: bool = True) -> Iterator[int]:
    """Run a registry and yield its port."""
    config = _CONFIG.format(root=folder / "data", delete=str(delete).lower())
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        config += f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}\n"
    (folder / "config.yml").write_text(config)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
        try:
            yield wait_for(folder / "log", process)
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_for(log: Path, process: subprocess.Popen[bytes], seconds: float = 60) -> int:
    """Wait until a registry listens; return its port, which it took itself: one chosen for it may be taken by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"listening on 127\.0\.0\.1:(\d+)\b", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"no registry came up: {log.read_text()}")
