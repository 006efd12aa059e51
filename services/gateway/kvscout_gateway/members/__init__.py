"""Workers and upstreams as this gateway and its peers list them, and how they stay in step."""
