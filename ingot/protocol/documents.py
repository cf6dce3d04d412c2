"""The documents that servers return about models, as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from ingot.tensors import TensorSpec, parse_spec


class TensorMetadata(TypedDict):
    """An input or output; ``shape`` has -1 for each dynamic dimension."""

    name: str
    datatype: str
    shape: list[int]


DECOUPLED = "decoupled"
"""The property of a model that answers a request several times."""


class ModelMetadata(TypedDict):
    """A model's name, platform, inputs and outputs.

    ``properties`` has which variant of an archive is served and why, its digest, as ``values.NAME`` the range of values
    of an input, the raw interface of a model with steps, and ``decoupled`` if a request gets several answers;
    ``labels`` the names of classes, over HTTP only. Servers other than Ingot's have neither.

    Examples:
        >>> with ingot.serve("./net.ingot", http_port=0, grpc_port=0) as server:
        ...     with ingot.Client(server.http_url) as client:
        ...         metadata: ingot.ModelMetadata = client.metadata("net")
        >>> [(spec["name"], spec["datatype"], spec["shape"]) for spec in metadata["inputs"]]
        [('x', 'FP32', [-1, 4])]
    """

    name: str
    versions: NotRequired[list[str]]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    properties: NotRequired[dict[str, str]]
    labels: NotRequired[list[str]]


def raw_inputs(properties: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the raw inputs that a model's steps accept, by name, from the properties of its metadata."""
    listed = "; ".join(properties.get(name, "") for name in ("raw_inputs", "raw_optional_inputs"))
    specs = (parse_spec(text)[0] for text in listed.split("; ") if text)
    return {spec.name: spec for spec in specs}


class Duration(TypedDict):
    """How often something happened, and how long it took in all, in nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(TypedDict):
    """The requests of a model: answered, failed, and by the stages that they passed."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: NotRequired[Duration]
    cache_miss: NotRequired[Duration]


class BatchStatistics(TypedDict):
    """The batches of one size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class Statistics(TypedDict):
    """The counts of one version of a model since it was loaded.

    ``last_inference`` is in milliseconds since 1970, ``inference_count`` counts samples, ``execution_count`` batches.
    ``ingot`` has what only Ingot's servers know, over HTTP only.

    Examples:
        >>> with ingot.serve("./net.ingot", http_port=0, grpc_port=0) as server:
        ...     with ingot.Client(server.http_url) as client:
        ...         [statistics] = client.statistics("net")
        >>> statistics["inference_count"], statistics["inference_stats"]["success"]["count"]
        (0, 0)
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]
    ingot: NotRequired[dict[str, Any]]
