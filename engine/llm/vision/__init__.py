"""Pictures in prompts of vision-language models."""
