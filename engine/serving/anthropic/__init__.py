"""Anthropic's Messages API, as another form of chat requests."""
