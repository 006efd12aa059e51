"""Tokens, and what they are made of: a tokenizer, a chat template, calls of tools."""
