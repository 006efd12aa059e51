"""Event feeds of worker ranks: ZMQ, NATS core, gRPC push, peers."""
