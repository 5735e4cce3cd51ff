"""What runs in a worker process: its loop, the nodes in it, its memory and its device."""
