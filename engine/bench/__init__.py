"""Load generation and measurement for `weftline bench` and `weftline profile`."""
