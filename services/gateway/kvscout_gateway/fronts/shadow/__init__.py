"""Shadow mode: the user's own balancer decides, and what the policy would have decided is scored beside it.

::

    client ──▶ ShadowFront ──request as it came──▶ balancer ──▶ an engine
                   │                                   └─ answer: usage, and who served ─┐
                   └─▶ Score: tokens ─▶ indexer ─▶ scheduler, booked as it would run ────┴─▶ ShadowReport, by the hour

Nothing that is scored delays, changes or fails a request.
"""
