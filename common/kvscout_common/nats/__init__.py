"""The connection to NATS that the parts of a process share."""
