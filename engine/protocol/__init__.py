"""Values and messages that cross a process boundary."""
