"""Publishing of events by bridges and publishers: batches, states, and answers to recovery requests."""
