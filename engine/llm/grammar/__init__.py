"""Answers that must be of a form."""
