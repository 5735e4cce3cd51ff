"""Tensor memory shared between processes: specs, blocks, arenas, leases and views."""
