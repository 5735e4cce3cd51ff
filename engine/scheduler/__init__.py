"""Decide which work runs where and when: requests, queues, batches, workers, sleep and shared memory; pure."""
