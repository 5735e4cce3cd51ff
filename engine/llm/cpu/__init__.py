"""Rounds on a CPU."""
