"""Batch jobs: a pipeline run over a data set with exactly-once results."""
