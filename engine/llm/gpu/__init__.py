"""GPU backend of the LLM."""
