"""Pipeline definitions: graphs, checks, placement and plans; pure."""
