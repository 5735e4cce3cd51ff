"""Weftline: models woven into one pipeline on shared GPUs."""
