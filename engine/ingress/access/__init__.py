"""Who may do what, over which connection, with which memory: the checks every door makes before anything else."""
