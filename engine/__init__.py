"""How a plan runs: scheduling, processes, messages, and the sessions people use."""
