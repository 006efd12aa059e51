"""Protobuf messages and packed bytes to and from the scheduler's values."""
