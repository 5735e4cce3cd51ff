"""Ingress processes of their own: doors that reach the engine through a socket and two granted extents of memory."""
