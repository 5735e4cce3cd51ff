"""Replicas on a Ray cluster: jobs by Ray Data, services by Ray Serve."""
