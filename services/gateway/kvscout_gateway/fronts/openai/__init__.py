"""OpenAI's HTTP API, as a transparent proxy: the client's body to the engine's same endpoint, the engine's bytes back.

::

    front.py ── which path, for whom (access.py) ──┬─ generation.py   completions, chat: placed, booked, followed
                                                   │    ├─ body.py        the client's JSON, edited in place
                                                   │    └─ sessions.py    the worker that a session had
                                                   ├─ models.py       what is served here, in the engines' own words
                                                   ├─ thresholds.py   /busy_threshold
                                                   └─ passthrough.py  everything else: any healthy worker

`refusals.py` says in OpenAI's shape what went wrong.
"""
