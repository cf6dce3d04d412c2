"""Where data comes from: arrays, files, folders and iterables.

This file chooses the reader of a source; collect.py groups what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument, NotFound
from ingot.quant.data.sources import files, images, traffic
from ingot.quant.data.sources.collect import Source
from ingot.tensors import Signature

__all__ = ["Source", "open_source"]


def open_source(signature: Signature, data: Any, transform: str | None, what: str, limit: int) -> Source:
    """Return the source for ``data``.

    Args:
        signature: the model's.
        data: see :meth:`ingot.quant.data.samples.Samples.read`.
        transform: how images become arrays.
        what: the data's name in messages.
        limit: how many rows will be read.

    Raises:
        NotFound: there is no such file or folder.
        InvalidArgument: the format is unknown, or a transform is given for data other than images.
    """
    if isinstance(data, str) and not data.strip():  # as an unset shell variable yields
        raise InvalidArgument(
            f"the path of {what} is empty; give one, such as '.' for the current folder, or leave it out"
        )
    folder = Path(data) if isinstance(data, str | Path) else None
    if folder is not None and folder.is_dir():
        found = _open_folder(signature, folder, transform, what, limit)
        if found is not None:
            return found
    elif folder is not None and not folder.exists():
        raise NotFound(f"there is no file {folder}")
    elif transform is None and folder is not None:
        return _open_file(signature, folder, what)
    if transform is not None:
        raise InvalidArgument(f"a transform is for a folder of images, which {what} is not; leave it out")
    if isinstance(data, Mapping | tuple) or hasattr(data, "__array__"):  # tensors and arrays
        return Source(iter([(what, data)]))
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise InvalidArgument(
            f"{what} is of type {type(data).__name__}; pass arrays by name, a path, or an iterable of such items"
        )
    items: Iterator[tuple[str, Any]] = ((f"item {number} of {what}", item) for number, item in enumerate(data))
    return Source(items, single=True, bounded=True)


def _open_folder(signature: Signature, folder: Path, transform: str | None, what: str, limit: int) -> Source | None:
    where = f" in {folder}"
    recorded = traffic.find(folder)
    arrays = sorted(folder.glob("*.npy"))
    if transform is not None and (recorded or arrays):
        return None
    if recorded:
        return Source(traffic.read(recorded, what), where, bounded=True, recorded=True)
    if arrays:
        named = {path.stem: files.load_npy(path) for path in arrays}
        return Source(iter([(f"{what}{where}", named)]), where)
    pictures = images.find(folder)
    if not pictures:
        raise InvalidArgument(
            f"{folder} contains neither .npy files, one per input, nor images ({', '.join(images.SUFFIXES)}), nor "
            "recorded traffic (.safetensors)"
        )
    return images.open_folder(signature, folder, pictures, transform, limit)


def _open_file(signature: Signature, path: Path, what: str) -> Source:
    where, suffix = f" in {path}", path.suffix.lower()
    if suffix == ".safetensors":
        return Source(traffic.read([path.resolve()], what), where, bounded=True, recorded=True)
    if suffix == ".npy":
        array = files.load_npy(path)
        if len(signature.inputs) > 1:
            names = ", ".join(spec.name for spec in signature.inputs)
            raise InvalidArgument(f"{path} contains one array, but the model has several inputs ({names}); use an .npz")
        return Source(iter([(f"{what}{where}", array)]), where)
    if suffix != ".npz":
        raise InvalidArgument(
            f"{path} is not data of a known kind: .npz, .npy, .safetensors of recorded traffic, or a folder of such "
            "files or of images"
        )
    return Source(iter([(f"{what}{where}", files.load_npz(path))]), where)
