"""Rounds on a GPU."""
