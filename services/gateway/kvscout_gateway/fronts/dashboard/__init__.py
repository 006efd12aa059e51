"""The page that shows a kvscout, at / of the gateway's HTTP port.

::

    sampling ── every 10 s, of this process alone ──▶ History ─┐
    looking ── while somebody watches ──▶ Moment, findings ────┴─▶ document ──▶ viewers ──▶ page

Nothing is queried while nobody watches.
"""
