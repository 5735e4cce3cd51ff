"""OpenAI-compatible HTTP routes."""
