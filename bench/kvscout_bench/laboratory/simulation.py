"""The event loop: one heap, whole picoseconds, nothing by chance that is not drawn from the seed."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from kvscout_bench.laboratory.index import LateIndex
from kvscout_bench.laboratory.latencies import Latencies
from kvscout_bench.laboratory.records import Record, Run, WorkerRecord
from kvscout_bench.laboratory.router import MODEL, Ask, Replica, name_of, number_of
from kvscout_bench.laboratory.timing import picoseconds
from kvscout_bench.laboratory.worker import NEVER, EngineSettings, Job, Worker
from kvscout_bench.laboratory.workload import Workload
from kvscout_common.errors import ConfigError, KvscoutError
from kvscout_common.worker import Role, WorkerSpec
from kvscout_scheduler.active_load import MakeLoad
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.settings import SchedulerSettings

_FIRST, _LATER = 0, 1
"""Of two things at one time, what reaches a worker comes before what the worker does."""
HEARTBEAT_SECONDS = 0.25
"""Between two looks of a replica at what it owes the others, when nothing happens."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What serves a workload."""

    workers: int = 16
    """Those that decode."""
    prefill_workers: int = 0
    """Those that only compute prompts; 0 = every worker does both."""
    engine: EngineSettings = EngineSettings()
    speeds: tuple[float, ...] = ()
    """Of the first workers, in those of the others."""
    gateways: int = 1
    replicas: int = 1
    """Of the scheduler; gateways are spread over them."""
    latencies: Latencies = Latencies()
    tells_output: bool = False
    """Whether gateways say how long the output is going to be."""
    seed: int = 0

    def validate(self) -> Cluster:
        """Itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in ("workers", "gateways", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if self.prefill_workers < 0:
            raise ConfigError("must not be negative", field="prefill_workers")
        if len(self.speeds) > self.workers + self.prefill_workers:
            raise ConfigError(f"there are {self.workers + self.prefill_workers} workers", field="speeds")
        if not all(0 < speed < float("inf") for speed in self.speeds):
            raise ConfigError("must be positive numbers", field="speeds")
        self.engine.validate()
        return self


@dataclass(slots=True)
class _Request:
    """One request under way."""

    request_id: str
    flow: int
    turn: int
    nodes: array[int]
    record: Record
    replica: Replica
    job: Job | None = None
    prefill_job: Job | None = None


class Simulation:
    """One run of one policy. Used once.

    Args:
        workload: What is asked.
        cluster: What serves it.
        settings: Of the schedulers, their policy among them.
        policies: That they know.
        on_done: Called with the number of requests that have come, for progress.
        make_load: Which twin of the scheduler keeps the load; None = the native one where it is built.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        settings: SchedulerSettings,
        policies: PolicyRegistry,
        *,
        on_done: Callable[[int], None] = lambda _: None,
        make_load: MakeLoad | None = None,
    ) -> None:
        cluster.validate()
        if cluster.engine.block_size != workload.block_size:
            raise ConfigError(f"the workload has blocks of {workload.block_size}", field="block_size")
        self._workload = workload
        self._cluster = cluster
        self._on_done = on_done
        self._now = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._run = Run()
        self._left = workload.requests
        self._numbers = 0
        latencies = cluster.latencies
        self._route = picoseconds(latencies.route_ms / 1000)
        self._report = picoseconds(latencies.report_ms / 1000)
        self._sync = picoseconds(latencies.sync_ms / 1000)
        self._expiry = picoseconds(settings.expiry_seconds)
        total = cluster.workers + cluster.prefill_workers
        self._index = LateIndex(total, picoseconds(latencies.event_ms / 1000))
        speeds = (*cluster.speeds, *[1.0] * (total - len(cluster.speeds)))
        self._workers = [Worker(cluster.engine, speed) for speed in speeds]
        self._wakes = [0] * total
        """Which planned wake-up of each worker holds; those before it are void."""
        self._batch_since = [0] * total
        self._run.workers = [WorkerRecord() for _ in range(total)]
        specs = [self._spec(number) for number in range(total)]
        self.replicas = [
            Replica(
                number,
                specs,
                settings=settings,
                policies=policies,
                now=lambda: self._now,
                seed=cluster.seed,
                replicated=cluster.replicas > 1,
                make_load=make_load,
            )
            for number in range(cluster.replicas)
        ]
        self._flushing = [False] * cluster.replicas
        self._numbered = {id(replica): number for number, replica in enumerate(self.replicas)}

    def run(self) -> Run:
        """Runs until every request has ended."""
        for number, flow in enumerate(self._workload.flows):
            self._at(picoseconds(flow.start_seconds), _LATER, self._arrive, number, 0)
        self._at(self._expiry, _LATER, self._expire)
        if len(self.replicas) > 1:
            self._at(0, _LATER, self._heartbeat)
        heap = self._heap
        while self._left:
            self._now, _, _, call, arguments = heappop(heap)
            call(*arguments)
        self._run.ended = self._now
        self._settle()
        for record, worker in zip(self._run.workers, self._workers, strict=True):
            record.busy, record.preemptions = worker.busy_time, worker.preemptions
        self._run.queued = sum(replica.core.stats.queued for replica in self.replicas)
        self._run.steps = self._sequence
        return self._run

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing is left of any request."""
        for worker in self._workers:
            worker.check_invariants()
            assert not worker.batch, "requests are left in a batch"
            assert not worker.waiting, "requests still wait at a worker"
            assert not worker.cache.used, "blocks are still referenced"
        for replica in self.replicas:
            replica.check_idle()

    def _settle(self) -> None:
        """Lets what is under way arrive."""
        until = self._now + 100 * (self._report + self._sync) + picoseconds(2 * HEARTBEAT_SECONDS)
        while self._heap and self._heap[0][0] <= until:
            self._now, _, _, call, arguments = heappop(self._heap)
            call(*arguments)

    def _at(self, time: int, order: int, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, order, self._sequence, call, arguments))

    def _spec(self, number: int) -> WorkerSpec:
        cluster = self._cluster
        role = Role.AGGREGATED
        if cluster.prefill_workers:
            role = Role.DECODE if number < cluster.workers else Role.PREFILL
        return WorkerSpec(
            worker_id=name_of(number),
            model=MODEL,
            block_size=cluster.engine.block_size,
            role=role,
            total_kv_blocks=cluster.engine.blocks,
            max_num_batched_tokens=cluster.engine.max_num_batched_tokens,
            total_slots=cluster.engine.max_num_seqs,
        )

    def _arrive(self, flow: int, turn: int) -> None:
        step = self._workload.flows[flow].turns[turn]
        record = Record(flow, turn, self._now, step.prompt_tokens, step.output_tokens)
        self._run.records.append(record)
        self._numbers += 1
        replica = self.replicas[self._numbers % self._cluster.gateways % len(self.replicas)]
        request = _Request(f"r{self._numbers}", flow, turn, step.nodes, record, replica)
        if self._cluster.prefill_workers:
            self._ask(request, Role.PREFILL, self._prefill_placed)
        else:
            self._ask(request, Role.AGGREGATED, self._placed)

    def _ask(self, request: _Request, role: Role, placed: Callable[[_Request, Decision], None]) -> None:
        record = request.record
        prompt = request.nodes[: record.prompt_tokens // self._workload.block_size]

        def answer(decision: Decision | KvscoutError) -> None:
            if isinstance(decision, KvscoutError):
                self._failed(request, decision)
            else:
                placed(request, decision)

        request.replica.place(
            Ask(
                request.request_id,
                role,
                record.prompt_tokens,
                prompt.tobytes(),
                self._index.overlaps(prompt, self._now),
                record.output_tokens if self._cluster.tells_output else 0,
                self._workload.flows[request.flow].turns[request.turn].priority,
                role is not Role.DECODE,
            ),
            answer,
        )
        self._changed(request.replica)

    def _placed(self, request: _Request, decision: Decision) -> None:
        record = request.record
        record.placed, record.worker = self._now, number_of(decision.rank)
        record.predicted_tokens = record.prompt_tokens - decision.uncached_tokens
        request.job = Job(request, request.nodes, record.prompt_tokens, record.output_tokens)
        self._at(self._now + self._route, _FIRST, self._submit, record.worker, request.job)

    def _prefill_placed(self, request: _Request, decision: Decision) -> None:
        record = request.record
        record.placed, record.worker = self._now, number_of(decision.rank)
        record.predicted_tokens = record.prompt_tokens - decision.uncached_tokens
        request.prefill_job = Job(request, request.nodes, record.prompt_tokens, 1, holds=True)
        self._at(self._now + self._route, _FIRST, self._submit, record.worker, request.prefill_job)

    def _decode_placed(self, request: _Request, decision: Decision) -> None:
        record, latencies = request.record, self._cluster.latencies
        record.decode_worker = number_of(decision.rank)
        request.job = Job(request, request.nodes, record.prompt_tokens, record.output_tokens, computed_elsewhere=True)
        tokens = record.prompt_tokens - decision.overlap_blocks * self._workload.block_size
        took = picoseconds(latencies.transfer_ms / 1000 + tokens * latencies.transfer_us_per_token / 1e6)
        self._at(self._now + self._route + took, _FIRST, self._transferred, request)

    def _transferred(self, request: _Request) -> None:
        record = request.record
        assert request.prefill_job is not None
        assert request.job is not None
        source = self._workers[record.worker]
        source.release(request.prefill_job)
        if source.end == NEVER and source.waiting:
            self._begin(record.worker)
        self._submit(record.decode_worker, request.job)

    def _submit(self, number: int, job: Job) -> None:
        worker = self._workers[number]
        self._run.workers[number].requests += 1
        idle = worker.end == NEVER
        before = worker.end
        try:
            worker.submit(job, self._now)
        except ConfigError as error:
            request: Any = job.request
            self._failed(request, error)
            return
        if idle:
            self._published(number)
        if worker.end != before:
            self._plan(number)

    def _begin(self, number: int) -> None:
        self._workers[number].begin(self._now)
        self._published(number)
        self._plan(number)

    def _published(self, number: int) -> None:
        events = self._workers[number].cache.take_events()
        if events:
            self._index.publish(number, events, self._now)

    def _plan(self, number: int) -> None:
        self._wakes[number] += 1
        self._at(self._workers[number].end, _LATER, self._wake, number, self._wakes[number])

    def _wake(self, number: int, planned: int) -> None:
        if planned != self._wakes[number]:
            return
        worker, record = self._workers[number], self._run.workers[number]
        batch = worker.batch
        record.batch_time += batch * (self._now - self._batch_since[number])
        record.largest_batch = max(record.largest_batch, batch)
        done, gap, late = worker.finish()
        if gap is not None:
            self._run.gaps.add(gap)
        for since, until in late:
            self._run.gaps.late(until - since)
        for job, finished in done:
            self._token(job, finished)
        self._batch_since[number] = self._now
        worker.begin(self._now)
        self._published(number)
        if worker.end != NEVER:
            self._plan(number)

    def _token(self, job: Job, finished: bool) -> None:
        request: Any = job.request
        record = request.record
        if job is request.prefill_job:
            record.cached_tokens = job.cached_tokens or 0
            self._at(self._now + self._report, _LATER, self._prefilled, request)
            return
        role = Role.DECODE if self._cluster.prefill_workers else Role.AGGREGATED
        if record.first_token < 0:
            record.first_token = self._now
            if role is Role.AGGREGATED:
                record.cached_tokens = job.cached_tokens or 0
            if not finished:
                self._at(self._now + self._report, _LATER, self._first_token, request, role)
        if finished:
            record.finished = self._now
            self._at(self._now + self._report, _LATER, self._ended, request, role)

    def _prefilled(self, request: _Request) -> None:
        request.replica.ended(request.request_id, Role.PREFILL, 1)
        self._changed(request.replica)
        self._ask(request, Role.DECODE, self._decode_placed)

    def _first_token(self, request: _Request, role: Role) -> None:
        request.replica.first_token(request.request_id, role)
        self._changed(request.replica)

    def _ended(self, request: _Request, role: Role) -> None:
        request.replica.ended(request.request_id, role, request.record.output_tokens)
        self._changed(request.replica)
        self._over(request)
        turns = self._workload.flows[request.flow].turns
        if request.turn + 1 < len(turns):
            due = request.record.finished + picoseconds(turns[request.turn + 1].think_seconds)
            self._at(max(due, self._now), _LATER, self._arrive, request.flow, request.turn + 1)

    def _failed(self, request: _Request, error: KvscoutError) -> None:
        request.record.error = f"{type(error).__name__}: {error}"
        role = Role.PREFILL if self._cluster.prefill_workers and request.job is None else Role.AGGREGATED
        if request.record.placed >= 0:
            self._at(self._now + self._report, _LATER, request.replica.ended, request.request_id, role, 0)
        self._over(request)
        for _ in self._workload.flows[request.flow].turns[request.turn + 1 :]:
            # The next prompt would contain an answer that does not exist.
            self._left -= 1

    def _over(self, request: _Request) -> None:
        self._left -= 1
        self._on_done(len(self._run.records))

    def _expire(self) -> None:
        for replica in self.replicas:
            replica.core.expire()
        if self._left:
            self._at(self._now + self._expiry, _LATER, self._expire)

    def _changed(self, replica: Replica) -> None:
        """What a replica did is told to the others, a little later and together with what it does meanwhile."""
        if replica.replication is None:
            return
        number = self._numbered[id(replica)]
        if not self._flushing[number]:
            self._flushing[number] = True
            self._at(self._now + self._sync // 2, _LATER, self._flush, number)

    def _flush(self, number: int) -> None:
        self._flushing[number] = False
        replication = self.replicas[number].replication
        assert replication is not None
        for outgoing in replication.take():
            for other in self.replicas:
                if other is not self.replicas[number]:
                    self._at(self._now + self._sync // 2, _LATER, self._receive, other, outgoing.payload)

    def _receive(self, replica: Replica, payload: bytes) -> None:
        assert replica.replication is not None
        replica.replication.receive(payload)

    def _heartbeat(self) -> None:
        for replica in self.replicas:
            assert replica.replication is not None
            replica.replication.tick()
            self._changed(replica)
        if self._left:
            self._at(self._now + picoseconds(HEARTBEAT_SECONDS), _LATER, self._heartbeat)
