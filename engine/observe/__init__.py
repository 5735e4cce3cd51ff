"""What a server tells of itself: series for Prometheus, spans for OpenTelemetry."""
