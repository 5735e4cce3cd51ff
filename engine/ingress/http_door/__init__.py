"""The HTTP door: OpenAI's paths, v2's REST protocol, probes and figures, over a Backend."""
