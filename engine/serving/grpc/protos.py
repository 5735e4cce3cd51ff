"""Protobuf messages and services: tritonclient's stubs for v2, own health and reflection, and Weftline's own service.

`grpcio-health-checking` and `grpcio-reflection` have the same messages, but their current releases conflict with the
protobuf version that tritonclient needs. The definitions below are loaded into a private descriptor pool, so that a
process may import those packages as well: protobuf refuses a second file with the same symbols in one pool.

Message classes are made at run time, so type checkers see `Any`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import model_config_pb2, service_pb2

# Source: github.com/grpc/grpc-proto, grpc/health/v1/health.proto, as a FileDescriptorProto in text format.
_HEALTH = """
name: "grpc/health/v1/health.proto" package: "grpc.health.v1" syntax: "proto3"
message_type { name: "HealthCheckRequest"
  field { name: "service" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
}
message_type { name: "HealthCheckResponse"
  field { name: "status" number: 1 label: LABEL_OPTIONAL
          type: TYPE_ENUM type_name: ".grpc.health.v1.HealthCheckResponse.ServingStatus" }
  enum_type { name: "ServingStatus"
    value { name: "UNKNOWN" number: 0 }
    value { name: "SERVING" number: 1 }
    value { name: "NOT_SERVING" number: 2 }
    value { name: "SERVICE_UNKNOWN" number: 3 }
  }
}
service { name: "Health"
  method { name: "Check"
           input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse" }
  method { name: "Watch" server_streaming: true
           input_type: ".grpc.health.v1.HealthCheckRequest" output_type: ".grpc.health.v1.HealthCheckResponse" }
}
"""

# Source: github.com/grpc/grpc, src/proto/grpc/reflection/v1alpha/reflection.proto, in the same form.
_REFLECTION = """
name: "grpc/reflection/v1alpha/reflection.proto" package: "grpc.reflection.v1alpha" syntax: "proto3"
message_type { name: "ServerReflectionRequest"
  field { name: "host" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "file_by_filename" number: 3 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 }
  field { name: "file_containing_symbol" number: 4 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 }
  field { name: "file_containing_extension" number: 5 label: LABEL_OPTIONAL oneof_index: 0
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ExtensionRequest" }
  field { name: "all_extension_numbers_of_type" number: 6 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 }
  field { name: "list_services" number: 7 label: LABEL_OPTIONAL type: TYPE_STRING oneof_index: 0 }
  oneof_decl { name: "message_request" }
}
message_type { name: "ExtensionRequest"
  field { name: "containing_type" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "extension_number" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 }
}
message_type { name: "ServerReflectionResponse"
  field { name: "valid_host" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "original_request" number: 2 label: LABEL_OPTIONAL
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ServerReflectionRequest" }
  field { name: "file_descriptor_response" number: 4 label: LABEL_OPTIONAL oneof_index: 0
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.FileDescriptorResponse" }
  field { name: "all_extension_numbers_response" number: 5 label: LABEL_OPTIONAL oneof_index: 0
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ExtensionNumberResponse" }
  field { name: "list_services_response" number: 6 label: LABEL_OPTIONAL oneof_index: 0
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ListServiceResponse" }
  field { name: "error_response" number: 7 label: LABEL_OPTIONAL oneof_index: 0
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ErrorResponse" }
  oneof_decl { name: "message_response" }
}
message_type { name: "FileDescriptorResponse"
  field { name: "file_descriptor_proto" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type { name: "ExtensionNumberResponse"
  field { name: "base_type_name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "extension_number" number: 2 label: LABEL_REPEATED type: TYPE_INT32 }
}
message_type { name: "ListServiceResponse"
  field { name: "service" number: 1 label: LABEL_REPEATED
          type: TYPE_MESSAGE type_name: ".grpc.reflection.v1alpha.ServiceResponse" }
}
message_type { name: "ServiceResponse"
  field { name: "name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
}
message_type { name: "ErrorResponse"
  field { name: "error_code" number: 1 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "error_message" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
}
service { name: "ServerReflection"
  method { name: "ServerReflectionInfo" client_streaming: true server_streaming: true
           input_type: ".grpc.reflection.v1alpha.ServerReflectionRequest"
           output_type: ".grpc.reflection.v1alpha.ServerReflectionResponse" }
}
"""

# What v2 has no message for. Fields are those of `deployments.DeploymentState`.
_WEFTLINE = """
name: "weftline/server.proto" package: "weftline" syntax: "proto3"
message_type { name: "DeploymentsRequest" }
message_type { name: "DeploymentsResponse"
  field { name: "deployments" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".weftline.Deployment" }
}
message_type { name: "Deployment"
  field { name: "node" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "model" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "steps" number: 3 label: LABEL_REPEATED type: TYPE_STRING }
  field { name: "others" number: 4 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "heavy" number: 5 label: LABEL_OPTIONAL type: TYPE_BOOL }
  field { name: "instances" number: 6 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "ready" number: 7 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "asleep" number: 8 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "devices" number: 9 label: LABEL_REPEATED type: TYPE_STRING }
  field { name: "queued" number: 10 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "items_max" number: 11 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "device_bytes" number: 12 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "resident_bytes" number: 13 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "kv_bytes" number: 14 label: LABEL_OPTIONAL type: TYPE_INT64 }
  field { name: "kv_used_bytes" number: 15 label: LABEL_OPTIONAL type: TYPE_INT64 }
}
service { name: "Server"
  method { name: "Deployments" input_type: ".weftline.DeploymentsRequest" output_type: ".weftline.DeploymentsResponse" }
}
"""

_POOL = DescriptorPool()


def _stubs(definition: str) -> SimpleNamespace:
    """Return the message classes of a file by name, and its DESCRIPTOR, as in a generated module."""
    proto = text_format.Parse(definition, FileDescriptorProto())
    _POOL.AddSerializedFile(proto.SerializeToString())
    file = _POOL.FindFileByName(proto.name)
    classes = {name: GetMessageClass(message) for name, message in file.message_types_by_name.items()}
    return SimpleNamespace(DESCRIPTOR=file, **classes)


V2: Any = service_pb2
CONFIG: Any = model_config_pb2
HEALTH: Any = _stubs(_HEALTH)
REFLECTION: Any = _stubs(_REFLECTION)
WEFTLINE: Any = _stubs(_WEFTLINE)

INFERENCE_SERVICE: ServiceDescriptor = V2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH_SERVICE: ServiceDescriptor = HEALTH.DESCRIPTOR.services_by_name["Health"]
REFLECTION_SERVICE: ServiceDescriptor = REFLECTION.DESCRIPTOR.services_by_name["ServerReflection"]
WEFTLINE_SERVICE: ServiceDescriptor = WEFTLINE.DESCRIPTOR.services_by_name["Server"]

FILES: tuple[FileDescriptor, ...] = tuple(one.DESCRIPTOR for one in (CONFIG, V2, HEALTH, REFLECTION, WEFTLINE))
"""Files of reflection, each after those it imports."""
