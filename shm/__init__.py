"""Where tensors live: specs, blocks, arenas and leases."""
