"""Triton kernels of the LLM: paged attention, KV writes, norms, gates and sampling."""
