"""Loads, and what became of their requests."""
