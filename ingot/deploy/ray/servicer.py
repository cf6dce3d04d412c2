"""The Open Inference Protocol's service for Ray's gRPC proxy, which passes each message on as bytes."""

from __future__ import annotations

from typing import Any

import grpc

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec

METHODS = tuple(pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods)


def add_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the methods to a proxy, which calls the method of the same name of a replica instead of the servicer's."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        method.name: grpc.stream_stream_rpc_method_handler(getattr(servicer, method.name))
        if method.client_streaming
        else grpc.unary_unary_rpc_method_handler(getattr(servicer, method.name))
        for method in METHODS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto_codec.SERVICE, handlers),))
