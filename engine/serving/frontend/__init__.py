"""Ingress processes: servers in processes of their own, connected by socket and shared memory."""
