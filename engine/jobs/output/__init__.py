"""Job results: atomically committed parts and their metadata."""
