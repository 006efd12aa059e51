"""The Gateway service over gRPC."""
