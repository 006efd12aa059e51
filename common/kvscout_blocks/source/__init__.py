"""A worker rank's batches, in order, into an index, whatever brings them.

::

    engine ══ZMQ══▶ intake, subscriber ▶ ┐
    publisher ══ NATS, gRPC ══ published ┴─▶ feed ─▶ source ── steps ─▶ sequence
                                               ▲        └── what was lost? ──▶ recovery, replay
"""
