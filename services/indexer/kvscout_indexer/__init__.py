"""The indexer: which worker holds which leading blocks of a prompt."""
