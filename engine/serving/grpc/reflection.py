"""Server reflection for tools such as grpcurl.

The messages of v1alpha and v1 are the same under two names. Tools try v1 first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from weftline.engine.serving.grpc.protos import (
    FILES,
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION,
    REFLECTION_SERVICE,
    WEFTLINE_SERVICE,
)
from weftline.engine.serving.grpc.service import Bidirectional

SERVICES = (REFLECTION_SERVICE.full_name, "grpc.reflection.v1.ServerReflection")
METHOD = "ServerReflectionInfo"

INVALID_ARGUMENT, NOT_FOUND = (3, "invalid argument"), (5, "not found")
"""gRPC status codes and their texts, for error responses."""

_LISTED = sorted(
    service.full_name for service in (INFERENCE_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE, WEFTLINE_SERVICE)
)


def make_reflection() -> Bidirectional:
    """Return the ServerReflectionInfo method, the same for both services."""
    pool = DescriptorPool()
    for file in FILES:
        pool.AddSerializedFile(file.serialized_pb)

    async def reflect(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async for request in requests:
            yield REFLECTION.ServerReflectionResponse(original_request=request, **_response_field(request, pool))

    return reflect


def _response_field(request: Any, pool: DescriptorPool) -> dict[str, Any]:
    """Return the one field of the response's oneof, by its name."""
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                services = [REFLECTION.ServiceResponse(name=name) for name in _LISTED]
                return {"list_services_response": REFLECTION.ListServiceResponse(service=services)}
            case "file_by_filename":
                return _files(pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                return _files(pool.FindFileContainingSymbol(request.file_containing_symbol))
            case "file_containing_extension":
                extension = request.file_containing_extension
                message = pool.FindMessageTypeByName(extension.containing_type)
                return _files(pool.FindExtensionByNumber(message, extension.extension_number).file)
            case "all_extension_numbers_of_type":
                message = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = sorted(extension.number for extension in pool.FindAllExtensions(message))
                found = REFLECTION.ExtensionNumberResponse(base_type_name=message.full_name, extension_number=numbers)
                return {"all_extension_numbers_response": found}
    except KeyError:
        return _error(*NOT_FOUND)
    return _error(*INVALID_ARGUMENT)


def _files(file: FileDescriptor) -> dict[str, Any]:
    """Return a file and its imports, each as an encoded FileDescriptorProto."""
    found: dict[str, FileDescriptor] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found[one.name] = one
            waiting.extend(one.dependencies)
    protos = [one.serialized_pb for one in found.values()]
    return {"file_descriptor_response": REFLECTION.FileDescriptorResponse(file_descriptor_proto=protos)}


def _error(number: int, message: str) -> dict[str, Any]:
    return {"error_response": REFLECTION.ErrorResponse(error_code=number, error_message=message)}
