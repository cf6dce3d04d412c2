"""What describes models, as JSON: metadata, and Triton's extensions for statistics and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import Unavailable
from ingot.protocol.documents import DECOUPLED, ModelMetadata, TensorMetadata
from ingot.runtime.dispatch.statistics import Duration, Stages, Statistics
from ingot.runtime.model import Model
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import ServedModel
from ingot.tensors import DType, TensorSpec

_NANOSECONDS = 1e9


def models(plane: DataPlane) -> dict[str, Any]:
    """Return the models that are served, with an entry per version."""
    listed = [
        {"name": model.name, "version": model.version, "ready": model.ready and not plane.draining}
        for model in plane.repository
    ]
    return {"models": listed}


def metadata(plane: DataPlane, name: str, version: str = "") -> ModelMetadata:
    """Return the metadata of a model.

    Raises:
        NotFound: no such model or version is served.
        Unavailable: it is still loading.
    """
    model = plane.repository.get(name, version)
    signature = plane.signature(name, version)
    found: ModelMetadata = {
        "name": name,
        "versions": [model.version] if version else [*plane.repository.versions(name)],
        "platform": model.platform,
        "inputs": [_metadata(spec) for spec in signature.inputs],
        "outputs": [_metadata(spec) for spec in signature.outputs],
    }
    properties = {**model.properties, **{f"values.{name}": str(bounds) for name, bounds in signature.values.items()}}
    if (steps := model.steps) is not None:
        properties |= steps.described
    if model.decoupled:
        properties |= {DECOUPLED: "true"}
    if isinstance(model, Model) and model.generation is not None:
        properties["task"] = model.generation.task
    if properties:
        found["properties"] = properties
    if model.labels:
        found["labels"] = [*model.labels]
    return found


def _metadata(spec: TensorSpec) -> TensorMetadata:
    return {"name": spec.name, "datatype": spec.dtype.value, "shape": spec.wire_shape}


def statistics(plane: DataPlane, name: str = "", version: str = "") -> dict[str, Any]:
    """Return the statistics of models: of all without a name. ``ingot`` has those that Triton does not define.

    Raises:
        NotFound: no such model or version is served.
    """
    return {"model_stats": [_statistics(model, counted) for model, counted in plane.statistics(name, version)]}


def _statistics(model: ServedModel, counted: Statistics) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": int(1000 * counted.last),
        "inference_count": counted.samples,
        "execution_count": counted.calls,
        "inference_stats": {
            "success": _duration(counted.answered),
            "fail": _duration(counted.failed),
            "queue": _duration(counted.queued),
            **_stages(counted.stages),
            "cache_hit": _duration(counted.cache_hit),
            "cache_miss": _duration(counted.cache_miss),
        },
        "response_stats": {},
        "batch_stats": [{"batch_size": rows, **_stages(stages)} for rows, stages in counted.by_samples.items()],
        "memory_usage": [],
        "ingot": {**counted.described, "update_failed": model.properties.get("update_failed", "")},
    }


def _stages(stages: Stages) -> dict[str, Any]:
    return {
        "compute_input": _duration(stages.joining),
        "compute_infer": _duration(stages.running),
        "compute_output": _duration(stages.splitting),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": int(duration.seconds * _NANOSECONDS)}


def configuration(plane: DataPlane, name: str, version: str = "") -> dict[str, Any]:
    """Return the part of a model's configuration that Triton's load generators and clients read.

    ``max_batch_size`` is not 0 only where the batch is every tensor's first dimension; the dimensions of tensors
    are then those behind it.

    Raises:
        NotFound: no such model or version is served.
        Unavailable: it is still loading.
    """
    model = plane.repository.get(name, version)
    signature, described = plane.signature(name, version), model.statistics().described
    if "batching" not in described:
        raise Unavailable(f"model '{model.name}' version {model.version} is {described['state']}")
    specs = (*signature.inputs, *signature.outputs)
    batched = bool(described["batching"]) and all(spec.axis(signature.batch) == 0 for spec in specs)
    config: dict[str, Any] = {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform.partition("_")[0],
        "max_batch_size": described["max_batch"] if batched else 0,
        "input": [{**tensor, **_format(tensor)} for tensor in _tensors(signature.inputs, batched=batched)],
        "output": _tensors(signature.outputs, batched=batched),
        "instance_group": [{"name": model.name, "kind": _kind(described), "count": described["instances"]}],
        "model_transaction_policy": {"decoupled": model.decoupled},
    }
    if model.sequential:
        config["sequence_batching"] = {}
    elif batched:
        config["dynamic_batching"] = {"preferred_batch_size": [described["rows_at_best"]]}
    if described["cached"]:
        config["response_cache"] = {"enable": True}
    return config


def _tensors(specs: Sequence[TensorSpec], *, batched: bool) -> list[dict[str, Any]]:
    return [
        {"name": spec.name, "data_type": _datatype(spec.dtype), "dims": spec.wire_shape[1 if batched else 0 :]}
        for spec in specs
    ]


def _format(tensor: Mapping[str, Any]) -> dict[str, str]:
    """Return the order of an image's dimensions, if it is certain: clients resize images by it."""
    dims = tensor["dims"]
    if len(dims) != 3 or tensor["data_type"] in ("TYPE_STRING", "TYPE_BOOL"):
        return {}
    first, last = (dims[index] in (1, 3) for index in (0, -1))
    return {"format": "FORMAT_NCHW" if first else "FORMAT_NHWC"} if first != last else {}


def _datatype(dtype: DType) -> str:
    return "TYPE_STRING" if dtype is DType.BYTES else f"TYPE_{dtype.value}"


def _kind(described: Mapping[str, Any]) -> str:
    return "KIND_CPU" if described["device"] == "cpu" else "KIND_GPU"
