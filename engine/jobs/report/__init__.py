"""How a job is told: while it runs, and when it is over."""
