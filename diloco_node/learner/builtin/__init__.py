"""The built-in trainer: a byte-level GPT on text."""
