"""What an engine is opened from: one model file and its options, from the settings to an engine process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from ingot.model_store.format.manifest import Division
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.gpu.graphs import GraphOptions

_PATHS = ("path", "ort_library", "cache", "packages")


@dataclass(frozen=True)
class EngineSpec:
    """A model file, and how an engine opens it.

    Args:
        path: the graph, with its external data or parts next to it; or, as ``model.py:Model``, a class in Python.
        format: the kind of file, since blobs have no suffix; see :data:`ingot.model_store.format.manifest.Format`.
        device: ``cpu``, ``cuda``, ``cuda:1`` for the second GPU, ``auto`` for a GPU if there is one, ``auto:1`` for the
            second if it can be used, or a plug-in's.
        threads: CPU threads per call; by default one per usable core, or PyTorch's own default.
        allow_code: load formats that can run their author's code: all but ``onnx``.
        ort_library: native library of custom operators, which ONNX Runtime loads for every graph.
        engine: one of :data:`ingot.runtime.engines.opening.ENGINES`, or a plug-in's, for a graph of format ``onnx``;
            other formats have one each.
        precision: of the computation: ``f32``; on a GPU also ``tf32``, in OpenVINO ``bf16``, in TensorRT ``fp16``.
        optimized: as for :class:`~ingot.runtime.engines.ort.ort_engine.OrtEngine`.
        packed: as for the same.
        graphs: batches that are to be captured as CUDA graphs on a GPU; None for none.
        convolutions: as for :class:`~ingot.runtime.engines.ort.ort_engine.OrtEngine`.
        gpu_arena: as for the same.
        cache: a folder in which TensorRT keeps what it compiled; None for none.
        max_batch: samples of the largest batch, for which TensorRT compiles the graph.
        shards: number of processes over which the model is divided, this one included; more than one needs the format
            ``pt2``, and :func:`ingot.runtime.engines.sharding.sharded.join` in each of them.
        plan: as for :class:`~ingot.runtime.engines.sharding.sharded.ShardedEngine`.
        batchable: as for the same.
        packages: a folder whose Python packages an engine process imports before all others; None for none.
        permissions: what a model in Python may do besides; see
            :mod:`~ingot.permissions`.
        settings: what a model in Python gets as settings.
        step: a step that decodes single items, as JSON; the format is then ``step``, and there is no file.
        decoder: the cache of a decoder; None for a model of other graphs.
    """

    path: Path
    _: KW_ONLY
    format: str = "onnx"
    device: str = "auto"
    threads: int | None = None
    allow_code: bool = False
    ort_library: Path | None = None
    engine: str = "onnxruntime"
    precision: str = "f32"
    optimized: bool = False
    packed: bool = True
    graphs: GraphOptions | None = None
    convolutions: str = "default"
    gpu_arena: str = "doubled"
    cache: Path | None = None
    max_batch: int = 64
    shards: int = 1
    plan: Mapping[str, Division] | None = None
    batchable: bool = True
    packages: Path | None = None
    permissions: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    step: str = ""
    decoder: DecoderOptions | None = None

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> EngineSpec:
        """Return the spec of its JSON form, in which paths are text."""
        paths = {name: Path(content[name]) for name in _PATHS if content[name] is not None}
        return cls(**{**content, **paths})
