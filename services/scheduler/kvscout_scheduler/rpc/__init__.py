"""The gRPC services of the scheduler, and its metrics."""
