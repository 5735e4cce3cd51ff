"""Client of a server: `Client` and `AsyncClient`, over the Open Inference Protocol v2 on gRPC."""
