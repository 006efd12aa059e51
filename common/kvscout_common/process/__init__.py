"""What one process asks of its system: memory, descriptors, files, its end."""
