"""HTTP of both transports, and what its bodies are read with."""
