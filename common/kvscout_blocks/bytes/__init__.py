"""What engines and kvscouts say of blocks, as plain values and as bytes.

::

    engine's msgpack ◀──▶ wire ◀──▶ events ◀──▶ codec ◀──▶ KvEventBatch
                                      │           │
                                 acceptance      dump
"""
