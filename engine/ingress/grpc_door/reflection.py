"""Server reflection: tools such as grpcurl ask what a server speaks. Shows the files served here and no others.

The library behind it knows v1alpha; v1 is the same messages under another name, and tools ask for it first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.reflection import aio

from weftline.engine.ingress.grpc_door.calls import Context, messages, refuse
from weftline.engine.ingress.grpc_door.protos import (
    FILES,
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION,
    REFLECTION_SERVICE,
)

SERVICES = (REFLECTION_SERVICE.full_name, "grpc.reflection.v1.ServerReflection")
METHOD = "ServerReflectionInfo"


def reflection_handler() -> grpc.RpcMethodHandler:
    """Return the handler of ServerReflectionInfo, of either service."""
    pool = DescriptorPool()
    for file in FILES:
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        pool.Add(proto)
    named = (INFERENCE_SERVICE.full_name, HEALTH_SERVICE.full_name, REFLECTION_SERVICE.full_name)
    servicer = aio.ReflectionServicer(named, pool=pool)

    async def handle(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            asked = messages(requests, REFLECTION.ServerReflectionRequest)
            async for response in servicer.ServerReflectionInfo(asked, context):
                yield response.SerializeToString()
        except Exception as error:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)
