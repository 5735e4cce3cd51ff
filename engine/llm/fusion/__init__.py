"""Operator fusion for loaded decoders, without a change of results."""
