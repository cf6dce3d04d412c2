"""What server reflection knows: our private descriptor pool with the standard services beside it."""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ingot.server.grpc import open_inference_pb2 as pb


def pool() -> DescriptorPool:
    """Return our private pool with the health and reflection services added, for reflection to find all three."""
    found: DescriptorPool = pb.DESCRIPTOR.pool
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        found.AddSerializedFile(file.serialized_pb)
    return found
