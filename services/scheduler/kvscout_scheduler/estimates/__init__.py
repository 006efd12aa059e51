"""Estimates learned from requests and engines: speeds, output lengths, popular prefixes."""
