"""JetStream: one stream a model, read from a position of this replica, and its snapshots."""
