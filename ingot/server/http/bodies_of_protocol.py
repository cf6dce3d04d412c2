"""The bodies of the Open Inference Protocol and its extensions as pydantic models, for /openapi.json."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Refusal(BaseModel):
    """Body of every status from 400."""

    error: str


class Live(BaseModel):
    """Answer of /v2/health/live."""

    live: bool


class Ready(BaseModel):
    """Answer of /v2/health/ready."""

    ready: bool


class ServerMetadata(BaseModel):
    """Answer of /v2. ``build`` (HTTP only) is ``compiled`` or ``pure``."""

    name: str
    version: str
    build: str
    extensions: list[str]


class Models(BaseModel):
    """Answer of /v2/models: every version of every model, each with its name and whether it is ready."""

    models: list[dict[str, str | bool]]


class TensorMetadata(BaseModel):
    """A tensor of a model; -1 is a dynamic dimension."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """Answer of /v2/models/{model}; the property ``values.NAME`` is the range of values of the input NAME.

    ``labels`` are the names of classes, in the order of an output's values.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    properties: dict[str, str] | None = None
    labels: list[str] | None = None


class ModelStatistics(BaseModel):
    """Answer of /v2/models/{model}/stats: Triton's statistics, and our own under ``ingot``."""

    model_stats: list[dict[str, Any]]


class ModelConfiguration(BaseModel):
    """Answer of /v2/models/{model}/config, as far as Triton's clients read it."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    instance_group: list[dict[str, Any]]
    model_transaction_policy: dict[str, bool]
    dynamic_batching: dict[str, Any] | None = None


class Region(BaseModel):
    """A region of shared memory; offset and size are in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class Registration(BaseModel):
    """Body of /v2/systemsharedmemory/region/{region}/register."""

    key: str
    offset: int = 0
    byte_size: int


class CudaRegion(BaseModel):
    """A region of a GPU's memory; its size is in bytes."""

    name: str
    device_id: int
    byte_size: int


class RawHandle(BaseModel):
    """A ``cudaIpcMemHandle_t`` in Base64."""

    b64: str


class CudaRegistration(BaseModel):
    """Body of /v2/cudasharedmemory/region/{region}/register."""

    raw_handle: RawHandle
    device_id: int
    byte_size: int


class LogSettings(BaseModel):
    """Answer of /v2/logging, and the body that changes some of it."""

    log_file: str | None = None
    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: int | None = None
    log_format: str | None = None


class ModelReady(BaseModel):
    """Answer of /v2/models/{model}/ready."""

    name: str
    ready: bool


class Tensor(BaseModel):
    """A tensor with its data, nested or flat; with ``parameters.binary_data_size`` the data follows the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    """An output that the client wants; ``parameters.binary_data`` asks for raw bytes."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(BaseModel):
    """Body of .../infer."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: list[Tensor]
    outputs: list[RequestedOutput] | None = None


class InferResponse(BaseModel):
    """Answer of .../infer."""

    model_name: str
    model_version: str | None = None
    id: str | None = None
    outputs: list[Tensor]


class GenerateResponse(BaseModel):
    """Answer of .../generate: an output of one element is a value, one of several a list of them."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    id: str | None = None
