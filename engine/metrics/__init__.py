"""Observability: Prometheus metrics and OpenTelemetry traces."""
