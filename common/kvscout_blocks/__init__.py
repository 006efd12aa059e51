"""KV events and the block index: what indexers, bridges and publishers of events share. Imports no service.

::

    engine ══ZMQ══▶ subscriber ──▶ wire ──▶ sequence ──▶ index (reference_index, native_index)
                                     │                     │
                                  events ◀──── codec ────▶ dumps, messages
"""
