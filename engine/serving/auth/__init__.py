"""Access control of all servers: authentication, rate limits, TLS and shared-memory regions."""
