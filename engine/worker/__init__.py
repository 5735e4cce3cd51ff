"""Worker processes: the main loop, hosted steps, shared memory and the device."""
