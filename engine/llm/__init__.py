"""The paged LLM: pages, rounds, attention, sampling, text, and the node that puts them behind the node contract."""
