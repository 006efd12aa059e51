"""The bridge: an engine's ZMQ events in, `KvEventBatch` on NATS out, with a local index to recover from."""
