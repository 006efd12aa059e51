"""gRPC servers and channels of both transports."""
