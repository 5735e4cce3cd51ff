"""Checks of a pipeline before it starts."""
