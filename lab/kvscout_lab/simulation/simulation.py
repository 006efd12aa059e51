"""A cluster in simulated time: clients and gateways, and their schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop
from random import Random
from typing import cast

from kvscout_common.errors import ConfigError, KvscoutError
from kvscout_common.worker import ALL_TENANTS, Adapter, Role, WorkerSpec
from kvscout_lab.simulation.cluster import Cluster, Picture
from kvscout_lab.simulation.engines import FIRST, LATER, Engines
from kvscout_lab.simulation.pictures import RoutedPrefixes
from kvscout_lab.simulation.records import Record, Run
from kvscout_lab.simulation.router import MODEL, GatewayBooking, PlacementRequest, Replica, name_of, number_of
from kvscout_lab.simulation.timing import picoseconds
from kvscout_lab.simulation.worker import NEVER, Job
from kvscout_lab.workloads.workload import Turn, Workload
from kvscout_scheduler.load.active_load import MakeLoad
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.reservation import OwnerName
from kvscout_scheduler.values.settings import SchedulerSettings

HEARTBEAT_SECONDS = 0.25
"""Between two looks of a replica at what it owes the others, when nothing happens."""


@dataclass(slots=True)
class _Request:
    """One request under way."""

    request_id: str
    turn: Turn
    record: Record
    gateway: int
    """-1 = it goes past all gateways."""
    pending: tuple[PlacementRequest, Callable[[_Request, Decision], None]] | None = None
    """While it waits for a worker."""
    booked: GatewayBooking | None = None
    """Since it has one."""
    abandoned: bool = False
    """Its gateway is gone."""
    job: Job | None = None
    prefill_job: Job | None = None


class Simulation(Engines):
    """One run of one policy. Used once.

    Args:
        workload: Requests and their times.
        cluster: Workers, schedulers and latencies.
        settings: Settings of the schedulers, their policy among them.
        policies: That they know.
        on_done: Called with the number of requests that have come, for progress.
        make_load: Makes the load of a pool; None = native where it is built.
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
        super().__init__(cluster.validate())
        if cluster.engine.block_size != workload.block_size:
            raise ConfigError(f"the workload has blocks of {workload.block_size}", field="block_size")
        self._workload = workload
        self._cluster = cluster
        self._on_done = on_done
        self._left = workload.requests
        self._numbers = 0
        latencies = cluster.latencies
        self._route = picoseconds(latencies.route_ms / 1000)
        self._report = picoseconds(latencies.report_ms / 1000)
        self._sync = picoseconds(latencies.sync_ms / 1000)
        self._expiry = picoseconds(settings.expiry_seconds)
        self._grace = picoseconds(settings.owner_grace_seconds)
        self._settled = 0
        """Until then bookings that nobody has any more end."""
        specs = [self._spec(number) for number in range(len(self._workers))]

        def start(number: int, starts: int = 0) -> Replica:
            return Replica(
                number,
                specs,
                settings=settings,
                policies=policies,
                now=lambda: self._now,
                seed=cluster.seed,
                replicated=cluster.replicas > 1,
                make_load=make_load,
                starts=starts,
            )

        self._start = start
        self.replicas = [start(number) for number in range(cluster.replicas)]
        self._down = False
        """The scheduler is, and who wants a worker waits."""
        self._requests: dict[str, _Request] = {}
        """Under way."""
        self._owners: list[OwnerName | None] = [None] * cluster.gateways
        self._sessions: list[int] = []
        """Session numbers of the gateways' streams."""
        self._flushing = [False] * cluster.replicas
        blocks = cluster.engine.blocks if cluster.picture is Picture.LRU else 0
        pictures = 0 if cluster.picture is Picture.EXACT else cluster.gateways
        self._pictures = [RoutedPrefixes(len(self._workers), blocks) for _ in range(pictures)]
        """Of each gateway; none where events say what is cached."""
        draw = Random(f"bypass {cluster.seed}").random
        self._bypassing = {flow for flow in range(len(workload.flows)) if draw() < cluster.bypass}
        self._bypassed = 0

    def run(self) -> Run:
        """Run until every request has ended."""
        for number, flow in enumerate(self._workload.flows):
            self._at(picoseconds(flow.start_seconds), LATER, self._arrive, number, 0)
        self._at(self._expiry, LATER, self._expire)
        if len(self.replicas) > 1:
            self._at(0, LATER, self._heartbeat)
        self._plan_faults()
        heap = self._heap
        while self._left:
            self._now, _, _, call, arguments = heappop(heap)
            call(*arguments)
        self._run.ended = self._now
        self._settle()
        for record, worker in zip(self._run.workers, self._workers, strict=True):
            record.busy, record.preemptions = worker.busy_time, worker.preemptions
        self._run.queued += sum(replica.core.stats.queued for replica in self.replicas)
        self._run.steps = self._sequence
        return self._run

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is left of any request."""
        for worker in self._workers:
            worker.check_invariants()
            assert not worker.batch, "requests are left in a batch"
            assert not worker.waiting, "requests still wait at a worker"
            assert not worker.cache.used, "blocks are still referenced"
        for replica in self.replicas:
            replica.check_idle()

    def _settle(self) -> None:
        """Deliver the messages under way."""
        until = self._now + 100 * (self._report + self._sync) + picoseconds(2 * HEARTBEAT_SECONDS)
        if self._cluster.faults.restart_gateway is not None:
            # What it had booked ends by itself.
            self._settled = self._now + self._grace + 2 * self._expiry
            until = max(until, self._settled)
        while self._heap and self._heap[0][0] <= until:
            self._now, _, _, call, arguments = heappop(self._heap)
            call(*arguments)

    def _spec(self, number: int) -> WorkerSpec:
        cluster = self._cluster
        role = Role.AGGREGATED
        if cluster.prefill_workers:
            role = Role.DECODE if number < cluster.workers else Role.PREFILL
        adapters = tuple(Adapter(f"adapter-{each + 1}") for each in range(cluster.adapters) if not (number + each) % 2)
        return WorkerSpec(
            worker_id=name_of(number),
            model=MODEL,
            block_size=cluster.engine.block_size,
            role=role,
            total_kv_blocks=cluster.engine.blocks,
            max_num_batched_tokens=cluster.engine.max_num_batched_tokens,
            total_slots=cluster.engine.max_num_seqs,
            adapters=adapters,
        )

    def _arrive(self, flow: int, turn: int) -> None:
        step = self._workload.flows[flow].turns[turn]
        record = Record(flow, turn, self._now, step.prompt_tokens, step.output_tokens)
        record.priority, record.sent = step.priority, self._now
        self._run.records.append(record)
        self._send(record)

    def _send(self, record: Record) -> None:
        """A client sends a request, for the first time or again."""
        self._numbers += 1
        turn = self._workload.flows[record.flow].turns[record.turn]
        spread = record.flow if self._cluster.sessions_hashed else self._numbers
        request = _Request(f"r{self._numbers}", turn, record, spread % self._cluster.gateways)
        self._requests[request.request_id] = request
        if record.flow in self._bypassing:
            self._bypass(request)
        elif self._cluster.prefill_workers:
            self._request_placement(request, Role.PREFILL, self._prefill_placed)
        else:
            self._request_placement(request, Role.AGGREGATED, self._placed)

    def _bypass(self, request: _Request) -> None:
        """Send a request to a worker past the gateways, whose turn it is."""
        record = request.record
        record.placed, record.worker = self._now, self._bypassed % len(self._workers)
        self._bypassed += 1
        request.gateway = -1
        request.job = self._job(request)
        self._at(self._now + self._route, FIRST, self._submit, record.worker, request.job)

    def _replica(self, request: _Request) -> Replica:
        return self.replicas[request.gateway % len(self.replicas)]

    def _request_placement(self, request: _Request, role: Role, placed: Callable[[_Request, Decision], None]) -> None:
        cluster, turn, size = self._cluster, request.turn, self._workload.block_size
        expected = turn.output_tokens if cluster.tells_output else 0
        placement = PlacementRequest(
            request.request_id,
            role,
            turn.prompt_tokens,
            turn.nodes[: turn.prompt_tokens // size].tobytes(),
            expected or (turn.max_tokens if cluster.expects_max_tokens else 0),
            turn.priority,
            role is not Role.DECODE,
            0 if cluster.expects_max_tokens else turn.max_tokens,
            turn.output_class,
            # A prefill request ends with its prompt.
            not turn.streamed and role is not Role.PREFILL,
            f"adapter-{turn.adapter}" if turn.adapter else "",
        )
        request.pending, request.booked = (placement, placed), None
        if not self._down:
            self._place(request, placement, placed)

    def _place(
        self, request: _Request, placement: PlacementRequest, placed: Callable[[_Request, Decision], None]
    ) -> None:
        """Request a worker from the scheduler of its gateway."""
        prompt = request.turn.nodes[: placement.prompt_tokens // self._workload.block_size]
        replica = self._replica(request)

        def answer(decision: Decision | KvscoutError) -> None:
            if request.abandoned:
                if isinstance(decision, Decision):
                    replica.ended(request.request_id, placement.role, 0)
                return
            request.pending = None
            if isinstance(decision, KvscoutError):
                self._failed(request, decision)
            else:
                request.booked = GatewayBooking(placement, decision, prefilled=False)
                placed(request, decision)

        tier_rows = None
        if self._pictures:
            rows = self._pictures[request.gateway].overlaps(prompt)
        else:
            rows = self._index.overlaps(prompt, self._now)
        if self._cluster.engine.offload_tokens and not self._pictures:
            tier_rows = self._tier_index.overlaps(prompt, self._now)
        replica.place(placement, rows, answer, self._owners[request.gateway], tier_rows)
        self._changed(replica)

    def _placed(self, request: _Request, decision: Decision) -> None:
        record = request.record
        record.placed, record.worker = self._now, number_of(decision.rank)
        record.predicted_tokens = record.prompt_tokens - decision.uncached_tokens
        if self._pictures:
            nodes = request.turn.nodes[: record.prompt_tokens // self._workload.block_size]
            self._pictures[request.gateway].routed(record.worker, nodes)
        request.job = self._job(request)
        self._at(self._now + self._route, FIRST, self._submit, record.worker, request.job)

    def _job(self, request: _Request, *, computed_remotely: bool = False) -> Job:
        turn = request.turn
        output = max(1, turn.output_tokens)
        return Job(request, turn.nodes, turn.prompt_tokens, output, computed_remotely=computed_remotely)

    def _prefill_placed(self, request: _Request, decision: Decision) -> None:
        record = request.record
        record.placed, record.worker = self._now, number_of(decision.rank)
        record.predicted_tokens = record.prompt_tokens - decision.uncached_tokens
        request.prefill_job = Job(request, request.turn.nodes, record.prompt_tokens, 1, holds=True)
        self._at(self._now + self._route, FIRST, self._submit, record.worker, request.prefill_job)

    def _decode_placed(self, request: _Request, decision: Decision) -> None:
        record, latencies = request.record, self._cluster.latencies
        record.decode_worker = number_of(decision.rank)
        job = request.job = self._job(request, computed_remotely=True)
        tokens = record.prompt_tokens - decision.overlap_blocks * self._workload.block_size
        took = picoseconds(latencies.transfer_ms / 1000 + tokens * latencies.transfer_us_per_token / 1e6)
        self._at(self._now + self._route + took, FIRST, self._transferred, request, job)

    def _transferred(self, request: _Request, job: Job) -> None:
        record = request.record
        source = self._workers[record.worker]
        if request.prefill_job is not None:
            source.release(request.prefill_job)
        if source.end == NEVER and source.waiting:
            self._begin(record.worker)
        self._submit(record.decode_worker, job)

    def _submit(self, number: int, job: Job) -> None:
        request = cast(_Request, job.request)
        if request.abandoned:
            return
        try:
            self._give(number, job)
        except ConfigError as error:
            self._failed(request, error)

    def _token(self, job: Job, finished: bool) -> None:
        request = cast(_Request, job.request)
        record = request.record
        if request.abandoned:
            return
        if job is request.prefill_job:
            record.cached_tokens = job.cached_tokens or 0
            self._at(self._now + self._report, LATER, self._prefilled, request)
            return
        role = Role.DECODE if self._cluster.prefill_workers else Role.AGGREGATED
        if record.first_token < 0:
            record.first_token = self._now
            if role is Role.AGGREGATED:
                record.cached_tokens = job.cached_tokens or 0
            if not finished and request.turn.streamed:
                self._at(self._now + self._report, LATER, self._first_token, request, role)
        if finished:
            record.finished = self._now
            self._at(self._now + self._report, LATER, self._ended, request, role)

    def _prefilled(self, request: _Request) -> None:
        if not request.abandoned:
            self._tell_end(request, Role.PREFILL, 1)
            self._request_placement(request, Role.DECODE, self._decode_placed)

    def _first_token(self, request: _Request, role: Role) -> None:
        if request.abandoned or request.booked is None:
            return
        request.booked.prefilled = True
        if not self._down:
            self._replica(request).first_token(request.request_id, role)
            self._changed(self._replica(request))

    def _tell_end(self, request: _Request, role: Role, output_tokens: int) -> None:
        """Report the end of a request; a scheduler that is down never receives it."""
        if request.gateway < 0:
            return
        request.booked = None
        if not self._down:
            self._replica(request).ended(request.request_id, role, output_tokens)
            self._changed(self._replica(request))

    def _ended(self, request: _Request, role: Role) -> None:
        if request.abandoned:
            return
        self._tell_end(request, role, request.turn.output_tokens)
        self._over(request)
        record = request.record
        turns = self._workload.flows[record.flow].turns
        if record.turn + 1 < len(turns):
            due = record.finished + picoseconds(turns[record.turn + 1].think_seconds)
            self._at(max(due, self._now), LATER, self._arrive, record.flow, record.turn + 1)

    def _failed(self, request: _Request, error: KvscoutError) -> None:
        record = request.record
        record.error = f"{type(error).__name__}: {error}"
        if request.booked is not None:
            role = request.booked.placement.role
            self._at(self._now + self._report, LATER, self._tell_end, request, role, 0)
        self._over(request)
        for _ in self._workload.flows[record.flow].turns[record.turn + 1 :]:
            # The next prompt would contain an answer that does not exist.
            self._left -= 1

    def _over(self, request: _Request) -> None:
        self._left -= 1
        self._requests.pop(request.request_id, None)
        self._on_done(len(self._run.records))

    def _expire(self) -> None:
        for replica in self.replicas:
            replica.core.expire()
        if self._left or self._now < self._settled:
            self._at(self._now + self._expiry, LATER, self._expire)

    def _changed(self, replica: Replica) -> None:
        """Plan to send the changes of a replica, a little later and together with those that come meanwhile."""
        if replica.replication is None:
            return
        number = replica.number
        if not self._flushing[number]:
            self._flushing[number] = True
            self._at(self._now + self._sync // 2, LATER, self._flush, number)

    def _flush(self, number: int) -> None:
        self._flushing[number] = False
        replication = self.replicas[number].replication
        if self._down or replication is None:
            return
        for outgoing in replication.take():
            for other in self.replicas:
                if other is not self.replicas[number]:
                    self._at(self._now + self._sync // 2, LATER, self._receive, other, outgoing.payload)

    def _receive(self, replica: Replica, payload: bytes) -> None:
        """Deliver a message, unless the replica was replaced meanwhile."""
        if self.replicas[replica.number] is replica and replica.replication is not None:
            replica.replication.receive(payload)

    def _heartbeat(self) -> None:
        for replica in self.replicas if not self._down else ():
            if replica.replication is not None:
                replica.replication.tick()
                self._changed(replica)
        if self._left:
            self._at(self._now + picoseconds(HEARTBEAT_SECONDS), LATER, self._heartbeat)

    def _plan_faults(self) -> None:
        faults, flows = self._cluster.faults, self._workload.flows
        first, span = flows[0].start_seconds, self._workload.span_seconds

        def at(share: float | None, call: Callable[[], None]) -> None:
            if share is not None:
                self._at(picoseconds(first + share * span), FIRST, call)

        at(faults.restart_scheduler, self._scheduler_goes)
        if faults.restart_gateway is not None:
            self._connect_gateways()
            at(faults.restart_gateway, self._gateway_goes)
        if faults.recover_worker is not None:
            prefill, decode = self._cluster.speeds_of(0)
            self._workers[0].set_speeds(prefill * faults.slow_speed, decode * faults.slow_speed, self._now)
            at(faults.recover_worker, self._worker_recovers)

    def _scheduler_goes(self) -> None:
        self._down = True
        down = picoseconds(self._cluster.faults.scheduler_down_seconds)
        self._at(self._now + down, FIRST, self._scheduler_comes)

    def _scheduler_comes(self) -> None:
        """All replicas begin anew, and gateways book there what runs; then pending requests ask for a worker."""
        self._run.queued += sum(replica.core.stats.queued for replica in self.replicas)
        self.replicas = [self._start(number, 1) for number in range(len(self.replicas))]
        if self._cluster.faults.restart_gateway is not None:
            self._connect_gateways()
        self._down = False
        for request in self._requests.values():
            if request.booked is not None:
                self._replica(request).book_again(request.booked, self._owners[request.gateway])
        for request in list(self._requests.values()):
            if request.pending is not None:
                self._place(request, *request.pending)
        for replica in self.replicas:
            self._changed(replica)

    def _connect_gateways(self) -> None:
        """Has bookings belong to the gateways that make them, so that they end when those go away."""
        self._sessions = []
        for gateway in range(self._cluster.gateways):
            owner = self._owners[gateway] or OwnerName(ALL_TENANTS, f"gateway-{gateway}")
            self._owners[gateway] = owner
            core = self.replicas[gateway % len(self.replicas)].core
            self._sessions.append(core.connect_owner(owner, ())[0])

    def _gateway_goes(self) -> None:
        """End the first gateway; another one replaces it at once, without the requests in flight."""
        faults, core, owner = self._cluster.faults, self.replicas[0].core, self._owners[0]
        if owner is not None:
            core.disconnect_owner(owner, self._sessions[0])
        if self._pictures:
            self._pictures[0].clear()
        successor = self._owners[0] = OwnerName(ALL_TENANTS, "gateway-0-again")
        self._sessions[0] = core.connect_owner(successor, ())[0]
        for request in [each for each in self._requests.values() if each.gateway == 0]:
            request.abandoned = True
            del self._requests[request.request_id]
            self._at(self._now + picoseconds(faults.abort_seconds), FIRST, self._abort, request)
            self._at(self._now + picoseconds(faults.retry_seconds), LATER, self._again, request.record)

    def _again(self, record: Record) -> None:
        """Send a client's request again; its time counts from now."""
        record.arrived, record.first_token = self._now, -1
        self._send(record)

    def _abort(self, request: _Request) -> None:
        job = request.job
        if job is not None:
            self._shorten(request.record.worker, lambda worker: worker.abort(job, self._now))

    def _worker_recovers(self) -> None:
        self._shorten(0, lambda worker: worker.set_speeds(*self._cluster.speeds_of(0), self._now))
