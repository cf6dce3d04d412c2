"""Server reflection, ``grpc.reflection.v1alpha`` and ``v1``, which differ only in their names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import (
    ErrorResponse,
    ExtensionNumberResponse,
    FileDescriptorResponse,
    ListServiceResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
    ServiceResponse,
)

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.proto_codec import parse

SERVICES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
_NOT_FOUND, _UNIMPLEMENTED = 5, 12


class Reflection:
    """Lists the services, and returns the files that describe their messages.

    Args:
        services: their names.
        pool: holds their files.
    """

    def __init__(self, services: Sequence[str], pool: DescriptorPool):
        self._services = sorted(services)
        self._pool = pool

    async def info(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answer ``ServerReflectionInfo``: each request in turn."""
        async for data in messages:
            request = parse(ServerReflectionRequest, data)
            try:
                answer = self._answer(request)
            except KeyError:
                answer = _error(_NOT_FOUND, "not found")
            answer.valid_host = request.host
            answer.original_request.CopyFrom(request)
            yield answer.SerializeToString()

    def _answer(self, request: ServerReflectionRequest) -> ServerReflectionResponse:
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            services = [ServiceResponse(name=name) for name in self._services]
            return ServerReflectionResponse(list_services_response=ListServiceResponse(service=services))
        if kind == "file_by_filename":
            return _files(self._pool.FindFileByName(request.file_by_filename))
        if kind == "file_containing_symbol":
            return _files(self._pool.FindFileContainingSymbol(request.file_containing_symbol))
        if kind == "file_containing_extension":
            asked = request.file_containing_extension
            message = self._pool.FindMessageTypeByName(asked.containing_type)
            extension = self._pool.FindExtensionByNumber(message, asked.extension_number)
            return _files(self._pool.FindFileContainingSymbol(extension.full_name))
        if kind == "all_extension_numbers_of_type":
            message = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(message))
            found = ExtensionNumberResponse(base_type_name=message.full_name, extension_number=numbers)
            return ServerReflectionResponse(all_extension_numbers_response=found)
        return _error(_UNIMPLEMENTED, "the request is empty")


def _error(code: int, text: str) -> ServerReflectionResponse:
    return ServerReflectionResponse(error_response=ErrorResponse(error_code=code, error_message=text))


def _files(file: FileDescriptor) -> ServerReflectionResponse:
    """Return a file and its dependencies."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file.name not in found:
            found[file.name] = file.serialized_pb
            waiting += file.dependencies
    files = FileDescriptorResponse(file_descriptor_proto=list(found.values()))
    return ServerReflectionResponse(file_descriptor_response=files)


def pool() -> DescriptorPool:
    """Return our own descriptor pool with the health and reflection services added."""
    found: DescriptorPool = pb.DESCRIPTOR.pool
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        found.AddSerializedFile(file.serialized_pb)
    return found
