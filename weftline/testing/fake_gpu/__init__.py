"""A GPU in host memory: a driver with the calls of the CUDA driver, stricter than a real one."""
