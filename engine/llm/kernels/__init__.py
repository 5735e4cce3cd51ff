"""Triton kernels of the LLM: attention over pages, writing pages, norms and gates; nothing here is loaded on a CPU."""
