"""Engine: sessions, scheduling, worker processes and messages."""
