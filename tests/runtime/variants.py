"""Archives whose variants give the same answers, at clearly different speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ingot.model_store import Archive, BatchLatency, BlobFolder, Evidence, Golden, Provenance, Serving, add_variant
from ingot.model_store.format import manifest
from ingot.model_store.format.manifest import Format
from ingot.runtime.machine import devices
from ingot.tensors import DType, Range, Signature, TensorSpec
from tests import onnx_models

SIZE = 256
SIGNATURE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", SIZE)),),
    (TensorSpec("y", DType.FP32, ("batch", SIZE)),),
    "batch",
    {"batch": Range(1, 64)},
)
X = np.linspace(0, 1, SIZE, dtype=np.float32)[np.newaxis]
RIGHT = Golden({"x": X}, {"y": 2 * X})
WRONG = Golden({"x": X}, {"y": 3 * X})


@dataclass(frozen=True)
class Made:
    """One variant: ``work`` products with the identity before y = 2 x, or ``graph`` as it is."""

    name: str
    work: int = 1
    graph: bytes = b""
    goldens: tuple[Golden, ...] = (RIGHT,)
    requires: dict[str, str] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    parent: str = ""
    format: Format = "onnx"


def archive(variants: Sequence[Made], name: str = "double") -> Archive:
    """Return an archive of the variants in this order; a parent must be among them."""
    blobs = BlobFolder.scratch()
    digests: dict[str, str] = {}
    made = {}
    for item in sorted(variants, key=lambda item: bool(item.parent)):
        serving = Serving(
            name=name,
            variant=item.name,
            format=item.format,
            precision="fp32",
            signature=SIGNATURE,
            requires=item.requires,
            parents=(digests[item.parent],) if item.parent else (),
            provenance=Provenance(source="by hand", created="2026-01-02T03:04:05Z"),
            evidence=item.evidence,
        )
        graph = blobs.put(item.graph or doubling(item.work), manifest.WEIGHT)
        made[item.name] = add_variant(blobs, serving, graph, (), item.goldens)
        digests[item.name] = made[item.name].digest
    return Archive.create(blobs, [made[item.name] for item in variants])


def timed(seconds: float, baseline: float | None = None, machine: str = "", holds: bool | None = None) -> Evidence:
    """Return evidence of one time at the batch sizes 1 and 8, by default as measured here."""
    times = [
        tuple(BatchLatency(rows=samples, seconds=item) for samples in (1, 8)) for item in (seconds, baseline or seconds)
    ]
    return Evidence(
        machine=machine or devices.describe(),
        latency=times[0],
        baseline=times[1] if baseline is not None else (),
        holds=holds,
    )


@cache
def doubling(work: int) -> bytes:
    kind = TensorProto.FLOAT
    constants = [
        numpy_helper.from_array(np.eye(SIZE, dtype=np.float32), "eye"),
        numpy_helper.from_array(np.array(2, np.float32), "two"),
    ]
    names = ["x", *(f"h{index}" for index in range(work))]
    nodes = [helper.make_node("MatMul", [left, "eye"], [right]) for left, right in pairwise(names)]
    nodes.append(helper.make_node("Mul", [names[-1], "two"], ["y"]))
    shape = ("batch", SIZE)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        return onnx_models.save(path, nodes, [("x", kind, shape)], [("y", kind, shape)], constants).read_bytes()
