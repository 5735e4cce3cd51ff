"""The gRPC door: the Open Inference Protocol v2 with Triton's extensions, health and reflection, over grpc.aio."""
