"""What is wrong with a kvscout, from what its services say of themselves.

::

    collection ── asks services and engines ──▶ Snapshot ──▶ overview: one row a service, one a worker's source
                                                        └──▶ diagnosis: findings, each with evidence and remedy

Only `collection` talks to anybody; the rest are functions of the `Snapshot`.
"""
