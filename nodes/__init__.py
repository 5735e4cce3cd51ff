"""Nodes: the node contract, the catalog and the built-in nodes."""
