"""Where data comes from: arrays, files, folders and iterables.

This file chooses the reader of a source; collect.py groups what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument, NotFound
from ingot.quant.data.sources import files, images, raw, traffic
from ingot.quant.data.sources.collect import Source
from ingot.quant.data.sources.traffic import OpenSteps
from ingot.steps import OpenedSteps
from ingot.tensors import Signature

__all__ = ["OpenSteps", "Source", "open_source"]


def open_source(
    signature: Signature, data: Any, transform: str | None, what: str, limit: int, steps: OpenSteps = lambda: None
) -> Source:
    """Return the source for ``data``.

    Args:
        signature: the model's signature.
        data: see :meth:`ingot.quant.data.samples.Samples.read`.
        transform: how images become arrays.
        what: the data's name in messages.
        limit: how many rows will be read.
        steps: returns the steps of the model, which make rows of raw data.

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
        found = _open_folder(signature, folder, transform, what, limit, steps)
        if found is not None:
            return found
    elif folder is not None and not folder.exists():
        raise NotFound(f"there is no file {folder}")
    elif transform is None and folder is not None:
        return _open_table(folder, steps(), limit) or _open_file(signature, folder, what, steps)
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


def _open_table(path: Path, steps: OpenedSteps | None, limit: int) -> Source | None:
    """Return the source of raw inputs in a file; None if it has another format.

    Raises:
        InvalidArgument: the model has no steps.
    """
    if path.suffix.lower() not in raw.SUFFIXES:
        return None
    if steps is None:
        raise InvalidArgument(
            f"{path} has raw inputs, but the model has no steps that make tensors of them; export it with its "
            "tokenizer or processor, or pass tensors as .npz"
        )
    return raw.open_table(path, steps, limit)


def _open_folder(
    signature: Signature, folder: Path, transform: str | None, what: str, limit: int, steps: OpenSteps
) -> Source | None:
    where = f" in {folder}"
    recorded = traffic.find(folder)
    arrays = sorted(folder.glob("*.npy"))
    if transform is not None and (recorded or arrays):
        return None
    if recorded:
        return Source(traffic.read(recorded, what, steps), where, bounded=True, recorded=True)
    if arrays:
        named = {path.stem: files.load_npy(path) for path in arrays}
        return Source(iter([(f"{what}{where}", named)]), where)
    opened = steps() if transform is None else None
    if opened is not None and (found := raw.open_folder(folder, opened, limit)) is not None:
        return found
    pictures = images.find(folder)
    if not pictures:
        raise InvalidArgument(
            f"{folder} contains neither .npy files, one per input, nor images ({', '.join(images.SUFFIXES)}), nor "
            "recorded traffic (.safetensors)"
        )
    return images.open_folder(signature, folder, pictures, transform, limit)


def _open_file(signature: Signature, path: Path, what: str, steps: OpenSteps) -> Source:
    where, suffix = f" in {path}", path.suffix.lower()
    if suffix == ".safetensors":
        return Source(traffic.read([path.resolve()], what, steps), where, bounded=True, recorded=True)
    if suffix == ".npy":
        array = files.load_npy(path)
        if len(signature.inputs) > 1:
            names = ", ".join(spec.name for spec in signature.inputs)
            raise InvalidArgument(f"{path} contains one array, but the model has several inputs ({names}); use an .npz")
        return Source(iter([(f"{what}{where}", array)]), where)
    if suffix != ".npz":
        raise InvalidArgument(
            f"{path} is not data of a known kind: .npz, .npy, .safetensors of recorded traffic, .csv or .jsonl of raw "
            "inputs, or a folder of files of tensors, traffic or images"
        )
    return Source(iter([(f"{what}{where}", files.load_npz(path))]), where)
