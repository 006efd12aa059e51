"""KV cache events and index state, as plain values and as bytes.

::

    engine's msgpack ──▶ wire ──▶ events ◀──▶ codec ◀──▶ KvEventBatch (messages)
                                      │           │
                                 acceptance      dump
"""
