"""Server reflection for tools such as grpcurl.

The messages of v1alpha and v1 are the same under two names. Tools try v1 first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from weftline.engine.serving.grpc.calls import Context, messages, refuse
from weftline.engine.serving.grpc.protos import (
    FILES,
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION,
    REFLECTION_SERVICE,
)

SERVICES = (REFLECTION_SERVICE.full_name, "grpc.reflection.v1.ServerReflection")
METHOD = "ServerReflectionInfo"

_LISTED = sorted(service.full_name for service in (INFERENCE_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE))


def reflection_handler() -> grpc.RpcMethodHandler:
    """Return the handler of ServerReflectionInfo, of either service."""
    pool = DescriptorPool()
    for file in FILES:
        pool.AddSerializedFile(file.serialized_pb)

    async def handle(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async for request in messages(requests, REFLECTION.ServerReflectionRequest):
                response = REFLECTION.ServerReflectionResponse(original_request=request, **_answer(request, pool))
                yield response.SerializeToString()
        except Exception as error:
            await refuse(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)


def _answer(request: Any, pool: DescriptorPool) -> dict[str, Any]:
    """Return the one field of the response's oneof that answers `request`, by its name."""
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                named = [REFLECTION.ServiceResponse(name=name) for name in _LISTED]
                return {"list_services_response": REFLECTION.ListServiceResponse(service=named)}
            case "file_by_filename":
                return _files(pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                return _files(pool.FindFileContainingSymbol(request.file_containing_symbol))
            case "file_containing_extension":
                asked = request.file_containing_extension
                message = pool.FindMessageTypeByName(asked.containing_type)
                return _files(pool.FindExtensionByNumber(message, asked.extension_number).file)
            case "all_extension_numbers_of_type":
                message = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = sorted(extension.number for extension in pool.FindAllExtensions(message))
                found = REFLECTION.ExtensionNumberResponse(base_type_name=message.full_name, extension_number=numbers)
                return {"all_extension_numbers_response": found}
    except KeyError:
        return _error(grpc.StatusCode.NOT_FOUND)
    return _error(grpc.StatusCode.INVALID_ARGUMENT)


def _files(file: FileDescriptor) -> dict[str, Any]:
    """Return a file and every file it imports, each as the bytes of its FileDescriptorProto."""
    found: dict[str, FileDescriptor] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found[one.name] = one
            waiting.extend(one.dependencies)
    protos = [one.serialized_pb for one in found.values()]
    return {"file_descriptor_response": REFLECTION.FileDescriptorResponse(file_descriptor_proto=protos)}


def _error(code: grpc.StatusCode) -> dict[str, Any]:
    number, message = code.value
    return {"error_response": REFLECTION.ErrorResponse(error_code=number, error_message=message)}
