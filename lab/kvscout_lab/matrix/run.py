"""Runs the matrix: a process per core, a line of a file per run, so that what was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TextIO

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Contender, Experiment
from kvscout_lab.cells.measures import Objective
from kvscout_lab.matrix.setups import TRACE, MatrixCell, Setup
from kvscout_lab.workloads.clients import as_clients_ask
from kvscout_lab.workloads.generators import generate, part_of_trace
from kvscout_lab.workloads.trace import read_trace
from kvscout_lab.workloads.workload import Workload, from_trace

LEAST_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Cells, policies and seeds of a run of the matrix."""

    cells: tuple[MatrixCell, ...]
    contenders: tuple[Contender, ...]
    seeds: int = 3
    scale: float = 1.0
    """Factor of the requests of every cell."""
    trace: Path | None = None

    def validate(self) -> MatrixPlan:
        """Itself, if it can be run.

        Raises:
            ConfigError: Naming what is wrong.
        """
        if self.seeds < 1:
            raise ConfigError("must be at least 1", field="seeds")
        if not 0 < self.scale <= 100:
            raise ConfigError("must be above 0 and at most 100", field="scale")
        if not self.contenders:
            raise ConfigError("there is none", field="policy")
        if len({contender.label for contender in self.contenders}) < len(self.contenders):
            raise ConfigError("one is named twice", field="policy")
        for cell in self.cells:
            if not cell.rate > 0:
                raise ConfigError(f"{cell.name} has no rate: nobody has looked where it saturates", field="cells")
        return self


class RunKey(NamedTuple):
    """One run: a policy in a cell with a seed."""

    cell: str
    policy: str
    seed: int


Results = dict[RunKey, dict[str, Any]]
"""`Measures.as_json` of each run."""


def experiment_of(setup: Setup, seed: int, scale: float = 1.0, trace: Path | None = None) -> Experiment:
    """Return the experiment of a setup.

    Args:
        setup: A setup of the matrix.
        seed: Seed of workload, clients and cluster.
        scale: Factor of its requests.
        trace: The file of those that replay one; its seed makes a difference in draws of the scheduler only.

    Raises:
        ConfigError: It needs a trace, and there is none.
    """
    requests = max(LEAST_REQUESTS, round(setup.requests * scale))
    workload: Workload
    if setup.workload == TRACE:
        if trace is None:
            raise ConfigError(f"{setup.name} replays one", field="trace")
        workload = from_trace(trace.stem, part_of_trace(list(read_trace(trace)), requests, seed))
    else:
        workload = _generated(setup.workload, requests, seed, setup.shared_tokens)
    workload = as_clients_ask(workload, replace(setup.clients, seed=seed))
    cluster = setup.cluster
    cluster = replace(cluster, seed=seed, engine=replace(cluster.engine, block_size=workload.block_size))
    objective = Objective(warm_up=setup.uncounted)
    return Experiment(workload, cluster, objective=objective, burst=setup.burst, lead_seconds=setup.lead_seconds)


@lru_cache(maxsize=12)
def _generated(name: str, requests: int, seed: int, shared_tokens: int) -> Workload:
    """Many cells have one workload."""
    return generate(name, requests, seed, shared_tokens)


def run_matrix(
    plan: MatrixPlan,
    *,
    jobs: int = 1,
    path: Path | None = None,
    again: Iterable[str] = (),
    on_done: Callable[[int, int, str], None] = lambda *_: None,
) -> Results:
    """Run what is not in a file yet.

    Args:
        plan: Cells, policies and seeds.
        jobs: Processes.
        path: To which every run is appended, and in which runs are looked up first; None = nothing is kept. A run
            counts if its cell is still defined as it was; what the scheduler's code has become nobody knows: see
            `again`.
        again: Labels of policies whose runs in the file do not count.
        on_done: Called with runs done, runs in all, and what was done last.

    Raises:
        ConfigError: The plan cannot be run, or the file is none of ours.
    """
    plan.validate()
    digests = {cell.name: digest(cell, plan.scale) for cell in plan.cells}
    keys = [
        RunKey(cell.name, contender.label, seed)
        for cell in plan.cells
        for seed in range(plan.seeds)
        for contender in plan.contenders
    ]
    known = _read(path, digests, set(again)) if path is not None and path.exists() else {}
    results = {key: known[key] for key in keys if key in known}
    tasks = list(_tasks(plan, results))
    done = len(results)
    on_done(done, len(keys), "in the file" if done else "")
    if not tasks:
        return results
    with _appending(path) as file:
        for cell, seed, found in _all(tasks, plan, jobs):
            for label, measures in found.items():
                results[RunKey(cell.name, label, seed)] = measures
                if file is not None:
                    line = {"cell": cell.name, "digest": digests[cell.name], "policy": label, "seed": seed, **measures}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
            done += len(found)
            on_done(done, len(keys), f"{cell.name}, seed {seed}")
    return results


def digest(cell: MatrixCell, scale: float) -> str:
    """Return the digest of all that defines a cell: with another one, its earlier runs do not count."""
    whole = replace(cell, setup=replace(cell.setup, warm_up=cell.setup.uncounted))
    return hashlib.sha256(repr((whole, scale)).encode()).hexdigest()[:16]


_Task = tuple[MatrixCell, int, tuple[Contender, ...], float, Path | None]


def _tasks(plan: MatrixPlan, results: Results) -> Iterator[_Task]:
    for cell in plan.cells:
        for seed in range(plan.seeds):
            missing = tuple(each for each in plan.contenders if RunKey(cell.name, each.label, seed) not in results)
            if missing:
                yield cell, seed, missing, plan.scale, plan.trace


def _run(task: _Task) -> dict[str, dict[str, Any]]:
    cell, seed, contenders, scale, trace = task
    experiment = experiment_of(cell.setup, seed, scale, trace)
    return {each.label: experiment.run(each.settings, cell.rate).as_json() for each in contenders}


def end_with_parent() -> None:
    """Make this process end with the one that started it, however that ended: else it would wait for ever."""
    parent = parent_process()
    if parent is not None:
        Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _all(
    tasks: Sequence[_Task], plan: MatrixPlan, jobs: int
) -> Iterator[tuple[MatrixCell, int, dict[str, dict[str, Any]]]]:
    if jobs == 1:
        for task in tasks:
            yield task[0], task[1], _run(task)
        return
    # A fresh interpreter each: threads and locks of this one are not copied.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        futures = {pool.submit(_run, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                task = futures[future]
                yield task[0], task[1], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _appending(path: Path | None) -> Iterator[TextIO | None]:
    """Return a file to append to, without what was only half written."""
    if path is None:
        yield None
        return
    with path.open("a+") as file:
        if file.tell():
            file.seek(0)
            file.truncate(file.read().rfind("\n") + 1)
        yield file


def _read(path: Path, digests: dict[str, str], again: set[str]) -> Results:
    found: Results = {}
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                # Whoever wrote it was stopped.
                continue
            try:
                run = json.loads(line)
                key = RunKey(run.pop("cell"), run.pop("policy"), run.pop("seed"))
                same = run.pop("digest") == digests.get(key.cell)
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"line {number} of {path} is not a run of a cell", field="out") from error
            if same and key.policy not in again:
                found[key] = run
    return found
