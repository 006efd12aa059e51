"""Gateway, indexer and scheduler in one process."""
