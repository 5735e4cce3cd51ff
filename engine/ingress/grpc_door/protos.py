"""The messages and services the gRPC door speaks, all of them other people's: tritonclient's and grpcio's stubs.

They are made at run time, so type checkers know nothing of them; this is the one place that says so.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

V2: Any = service_pb2
CONFIG: Any = model_config_pb2
HEALTH: Any = health_pb2
REFLECTION: Any = reflection_pb2

INFERENCE_SERVICE: ServiceDescriptor = V2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH_SERVICE: ServiceDescriptor = HEALTH.DESCRIPTOR.services_by_name["Health"]
REFLECTION_SERVICE: ServiceDescriptor = REFLECTION.DESCRIPTOR.services_by_name["ServerReflection"]

FILES: tuple[FileDescriptor, ...] = (CONFIG.DESCRIPTOR, V2.DESCRIPTOR, HEALTH.DESCRIPTOR, REFLECTION.DESCRIPTOR)
"""What reflection shows; each after those it imports."""
