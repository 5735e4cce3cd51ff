"""Device memory shared between processes: drivers, arenas, events and zero-copy tensors."""
