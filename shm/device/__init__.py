"""Device memory shared between processes: drivers, arenas, and tensors seen where they lie."""
