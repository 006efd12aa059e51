"""The gateway: hash once, ask the indexer, ask the scheduler, drive the engine."""
