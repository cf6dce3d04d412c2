"""Messages of gRPC as the JSON of operations: the parameters of the path and the body of a call, and its answer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.proto_codec import decode_parameters

Arguments = tuple[Mapping[str, str], Mapping[str, Any]]


def _none(request: Any) -> Arguments:
    return {}, {}


def _of_model(request: Any) -> Arguments:
    return {"model": request.name, "version": request.version}, {}


def _of_region(request: Any) -> Arguments:
    return {"region": request.name}, {}


def _registration(request: pb.SystemSharedMemoryRegisterRequest) -> Arguments:
    content = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
    return {"region": request.name}, content


def _cuda_registration(request: pb.CudaSharedMemoryRegisterRequest) -> Arguments:
    handle = {"b64": base64.b64encode(request.raw_handle).decode()}
    content = {"raw_handle": handle, "device_id": request.device_id, "byte_size": request.byte_size}
    return {"region": request.name}, content


def _index(request: pb.RepositoryIndexRequest) -> Arguments:
    return {}, {"ready": request.ready}


def _with_parameters(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> Arguments:
    chosen = {name: value for name, value in decode_parameters(request.parameters).items() if value is not None}
    return {"model": request.model_name}, {"parameters": chosen}


def _log_settings(request: pb.LogSettingsRequest) -> Arguments:
    return {}, decode_parameters(request.settings)


READ: Mapping[str, Callable[[Any], Arguments]] = {
    "ServerLive": _none,
    "ServerReady": _none,
    "ServerMetadata": _none,
    "ModelReady": _of_model,
    "ModelMetadata": _of_model,
    "ModelConfig": _of_model,
    "ModelStatistics": _of_model,
    "LogSettings": _log_settings,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _with_parameters,
    "RepositoryModelUnload": _with_parameters,
    "SystemSharedMemoryStatus": _of_region,
    "SystemSharedMemoryRegister": _registration,
    "SystemSharedMemoryUnregister": _of_region,
    "CudaSharedMemoryStatus": _of_region,
    "CudaSharedMemoryRegister": _cuda_registration,
    "CudaSharedMemoryUnregister": _of_region,
}
"""Returns the arguments of a call, by the method."""


def _regions(answer: list[dict[str, Any]]) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in answer}}


def _settings(answer: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {kinds[type(value)]: value} for name, value in answer.items()}}


WRITE: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "ModelConfig": lambda answer: {"config": answer},
    "LogSettings": _settings,
    "RepositoryIndex": lambda answer: {"models": answer},
    "SystemSharedMemoryStatus": _regions,
    "CudaSharedMemoryStatus": _regions,
}
"""Returns an answer in the form of its message, by the method, where that is another one than that of the JSON."""
