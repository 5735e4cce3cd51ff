"""Serving: gRPC and HTTP servers over a backend of named models."""
