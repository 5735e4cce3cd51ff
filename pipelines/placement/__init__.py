"""Placement of steps on processes, devices and memory."""
