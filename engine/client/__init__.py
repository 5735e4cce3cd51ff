"""The client of a running server: `Client` and its async twin, over the Open Inference Protocol v2 on gRPC."""
