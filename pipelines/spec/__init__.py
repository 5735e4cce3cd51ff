"""Pipeline files and the builder: schema, parser and graph."""
