"""Use of the system by one process: memory, descriptors, files, its end."""
