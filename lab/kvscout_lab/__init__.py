"""The laboratory: a deterministic simulation of a cluster that the scheduler's own code routes.

::

    workload.py, generators.py      what is asked: flows of turns, each a prompt as a chain of blocks
      │ clients.py                  how: bounds on outputs, answers that come as a whole, long ones, adapters
    simulation.py                   clients, gateways and schedulers; faults.py: what goes wrong
      ├─ router.py                  gateways and scheduler replicas: the scheduler's own policy, queue and active load
      │    └─ index.py              which worker is known to hold what, events arriving late
      └─ engines.py                 the event loop: simulated picoseconds, one heap
           └─ worker.py             an engine: continuous batching, chunked prefill, preemption
                ├─ timing.py        what a step takes; engines_known.py: of models on accelerators
                └─ kv_cache.py      its blocks: references, least recently used first out
    records.py ─▶ measures.py       what happened to each request ─▶ what the policy did
    bound.py                        what no policy can beat
    cells.py ─▶ report.py, plots.py policies side by side, over seeds (intervals.py); tables, pictures
    matrix.py, matrix_rates.py      named cells ─▶ matrix_run.py, in processes ─▶ matrix_report.py, what is lost
"""
