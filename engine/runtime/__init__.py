"""The event loop, worker processes, clock and sockets around the scheduler."""
