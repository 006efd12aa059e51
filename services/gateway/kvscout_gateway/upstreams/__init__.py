"""The indexers and schedulers that a gateway calls, over one stream each."""
