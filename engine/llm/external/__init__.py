"""External engines of the llm step: answers from a server with OpenAI's API."""
