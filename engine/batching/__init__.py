"""Where work waits for a step, and when a batch leaves with whom; pure."""
