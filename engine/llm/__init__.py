"""LLM inference engine: paged KV cache, continuous batching, attention, sampling, and the llm node."""
