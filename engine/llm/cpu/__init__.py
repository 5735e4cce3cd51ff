"""CPU backend of the LLM."""
