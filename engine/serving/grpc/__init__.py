"""gRPC server: Open Inference Protocol v2 with Triton's extensions, health and reflection."""
