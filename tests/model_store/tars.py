"""Tar files of any members, for archives that Ingot would not write."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

Member = tuple[tarfile.TarInfo, bytes]


def members(path: Path) -> list[Member]:
    with tarfile.open(path) as tar:
        return [(member, stream.read() if (stream := tar.extractfile(member)) else b"") for member in tar]


def write(path: Path, content: list[Member], form: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for member, data in content:
            tar.addfile(member, io.BytesIO(data))


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def rewritten(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change the members of an archive file by name."""
    content = {info.name: data for info, data in members(path)}
    change(content)
    write(path, [member(name, data) for name, data in content.items()])
