"""KV events and the block index: what indexers, bridges and publishers of events share. Imports no service.

::

    bytes ◀── index ◀── source ◀── publish          what imports what
"""
