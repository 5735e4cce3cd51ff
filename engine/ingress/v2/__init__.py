"""The Open Inference Protocol v2 as values: requests to asks, answers to responses, and both to bytes."""
