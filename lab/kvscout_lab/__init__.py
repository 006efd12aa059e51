"""The laboratory: a deterministic simulation of a cluster that the scheduler's own code routes.

Folders, each imports from those above it only::

    workloads/    requests: flows of turns, each a prompt as a chain of blocks
      sessions, trace, workload, generators   sessions of turns, traces, made workloads
      clients                                 output limits, whole answers, long answers, adapters
    simulation/   the cluster, in picoseconds on one heap
      simulation ─┬─ router ── index          gateways and scheduler replicas; which worker holds what, known late
                  └─ engines ── worker        event loop; an engine: continuous batching, chunked prefill, preemption
                       ├─ timing, known_engines   duration of a step; models on accelerators
                       └─ kv_cache                blocks: references, least recently used first out
      cluster, records                        settings, faults and latencies; records of each request and worker
    cells/        policies side by side: measures, lower bounds, seeds, tables and plots
    real_time/    drivers of real processes, their records and summaries, and the simulation beside them
    matrix/       named cells, run in processes, and verdicts on a policy
"""
