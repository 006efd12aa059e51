"""Diagnosis of a kvscout, from the statuses of its services.

::

    collection ── asks services and engines ──▶ Snapshot ──▶ overview: one row a service, one a worker's source
                                                        └──▶ diagnosis: findings, each with evidence and remedy

`gathering` has it done again and again, with loads and decisions, for whoever watches. Only these two talk to anybody;
the rest are functions of the `Snapshot`, or of the `Moment` that it was taken.
"""
