"""Who answers a job's rows: a session of its own, one that serves others too, or a server."""
