"""What is to be run: graphs, their checks and their plans; no processes and no torch."""
