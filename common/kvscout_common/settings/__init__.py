"""Configuration: flags, their environment variables, and what servers share of it."""
