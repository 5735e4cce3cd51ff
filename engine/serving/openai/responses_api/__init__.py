"""OpenAI's Responses API: requests become chat requests, answers become output items, and responses are kept."""
