"""The result of every lowering: a model as blobs of an archive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.export.program import Program
from ingot.model_store import BlobFolder
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import manifest
from ingot.model_store.format.manifest import Format
from ingot.model_store.format.partition import TorchHeader
from ingot.tensors import Signature


@dataclass(frozen=True)
class Packed:
    """A lowered model in a folder of blobs, with its ``format`` and ``requires`` in ``serving.json``.

    ``graph`` is the file that an engine opens, ``weights`` are the blobs that it refers to, ``notes`` are for the user.
    """

    graph: Descriptor
    weights: tuple[Descriptor, ...]
    format: Format
    requires: dict[str, str]
    notes: tuple[str, ...] = ()


def put(path: Path, blobs: BlobFolder) -> Descriptor:
    """Put a model file into ``blobs``, with its name as an annotation."""
    with path.open("rb") as stream:
        chunks = iter(lambda: stream.read(1 << 20), b"")
        return blobs.put(chunks, manifest.WEIGHT, {manifest.FILEPATH: path.name})


def header(program: Program, operators: Iterable[str] = ()) -> str:
    """Return the JSON header that Ingot stores in a file of a PyTorch format."""
    document = TorchHeader(torch=release(), signature=program.signature, operators=tuple(operators))
    return manifest.encode(document).decode()


def release() -> str:
    """Return PyTorch's version without the build suffix, such as ``+cpu``."""
    return torch.__version__.partition("+")[0]


def precision(weights: Iterable[tuple[str, int]], signature: Signature) -> str:
    """Return the floating-point type of most of the weights' bytes, as in names of variants: ``fp32``, ``bf16``.

    Args:
        weights: datatype, such as ``float32``, and size in bytes of each weight.
        signature: the source of the type of a model without weights.
    """
    totals: Counter[str] = Counter()
    for name, size in weights:
        if "float" in name:
            totals[name.replace("bfloat", "bf").replace("float", "fp")] += size
    floats = [spec.dtype.value.lower() for spec in signature.inputs if spec.dtype.is_float]
    return totals.most_common(1)[0][0] if totals else (*floats, "fp32")[0]


def precision_of(program: Program) -> str:
    """Return the precision of a program's weights."""
    tensors = (*program.exported.state_dict.values(), *program.exported.constants.values())
    held = [(str(item.dtype).removeprefix("torch."), item.nbytes) for item in tensors if torch.is_tensor(item)]
    return precision(held, program.signature)
