"""Structured output: constrained decoding by JSON schema, regular expression or grammar."""
