"""The HTTP APIs of OpenAI and Anthropic, as a transparent proxy: the client's body to the engine's same endpoint, the
engine's bytes back.

::

    http/router.py ── which path, for whom ──┬─ generation.py   requests for output: placed, booked, followed
                                             ├─ models.py       what is served here, in the engines' own words
                                             ├─ thresholds.py   /busy_threshold
                                             └─ passthrough.py  everything else: any healthy worker
"""
