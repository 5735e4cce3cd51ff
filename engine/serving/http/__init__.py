"""HTTP server: OpenAI API, v2 REST protocol, probes and metrics."""
