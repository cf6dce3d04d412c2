"""The folders of this process's control group, in which the limits of a container or a service are set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = "self/cgroup"


def folders(controller: str, root: Path = ROOT, proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yield the group's folder and those of the groups around it, whose limits also count.

    Within a container the group's own folder is often mounted as the root. Then the path that ``/proc`` reports may not
    exist, and the root is all.

    Args:
        controller: such as "memory", which has its own tree in control groups of version 1.
        root: where control groups are mounted.
        proc: where the file system of processes is mounted.
    """
    try:
        lines = (proc / _MEMBERSHIP).read_text().splitlines()
    except OSError:
        lines = []
    roots = {"": root, controller: root / controller}
    paths = dict.fromkeys(roots, Path())
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in paths:
                paths[name] = Path(path.lstrip("/"))
    for name, folder in roots.items():
        yield from (found for part in (paths[name], *paths[name].parents) if (found := folder / part).is_dir())
