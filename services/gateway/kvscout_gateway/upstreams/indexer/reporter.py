"""Reports of where prompts went to the indexers, so that they can predict their blocks there.

A decision is reported when its request is handed to the engine, to every replica of the shard that has the worker.
Nothing waits for a report: each replica has a bounded queue of its own and a task that empties it, many decisions a
message. A replica that lags or is away loses the oldest decisions, counted; one that takes none of a model is tried
again every few seconds, since it may have restarted in another mode, or the model's workers may have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvscout.v1 import indexer_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound, Unimplemented
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.rpc.channel import call
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.transport.wire_fields import bytes_field
from kvscout_gateway.upstreams.failover import Member, is_member_fault
from kvscout_gateway.upstreams.indexer.link import IndexerMember
from kvscout_gateway.values.decision import Decision

log = logging.getLogger("kvscout.gateway")

MAX_DECISIONS = 4096
"""Decisions that wait for one replica."""
MAX_BLOCKS = 262_144
"""Block hashes that wait for one replica: about 10 MiB."""
BATCH_DECISIONS = 256
BATCH_BLOCKS = 65_536
"""In one message, unless one decision has more: half a MiB."""
MAX_AGE_SECONDS = 10.0
"""An older decision is not worth reporting: engines have said themselves by then what they hold, and a prediction
lasts from its report on."""
LINGER_SECONDS = 0.005
"""Between two messages to one replica: what comes meanwhile goes together. The first one does not wait."""
RETRY_SECONDS = 0.5
REFUSAL_SECONDS = 5.0
"""Seconds for which a replica is sent nothing of a model whose decisions it refused."""
MAX_REFUSED = 4096
"""Models that are remembered as such; above, the one that was refused first is tried again."""
CALL_SECONDS = 1.0


@dataclass(slots=True)
class DecisionQueue:
    """Decisions that wait for one replica, oldest first; bounded. Pure."""

    max_decisions: int = MAX_DECISIONS
    max_blocks: int = MAX_BLOCKS
    lost: int = 0
    """Dropped because newer ones came, or because they grew too old."""
    _waiting: deque[tuple[float, Decision]] = field(default_factory=deque)
    _blocks: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, decision: Decision, now: float) -> None:
        """Add one; the oldest go if there are too many."""
        self._waiting.append((now, decision))
        self._blocks += decision.blocks
        while len(self._waiting) > self.max_decisions or (self._blocks > self.max_blocks and len(self._waiting) > 1):
            self._pop()
            self.lost += 1

    def take(self, now: float) -> list[tuple[float, Decision]]:
        """Remove the oldest ones that fit into a message and are worth it; return them with the time of their `put`."""
        taken: list[tuple[float, Decision]] = []
        blocks = 0
        while self._waiting and len(taken) < BATCH_DECISIONS:
            since, decision = self._waiting[0]
            if taken and blocks + decision.blocks > BATCH_BLOCKS:
                break
            self._pop()
            if decision.withdrawn:
                continue
            if now - since > MAX_AGE_SECONDS:
                self.lost += 1
                continue
            taken.append((since, decision))
            blocks += decision.blocks
        return taken

    def restore(self, taken: Sequence[tuple[float, Decision]]) -> None:
        """Put back what could not be delivered, as far as there is room."""
        for since, decision in reversed(taken):
            blocks = decision.blocks
            if len(self._waiting) >= self.max_decisions or self._blocks + blocks > self.max_blocks:
                self.lost += 1
                continue
            self._waiting.appendleft((since, decision))
            self._blocks += blocks

    def forget(self, tenant: str, model: str) -> None:
        """Drop those of a model that is refused."""
        self._waiting = deque(
            (since, decision)
            for since, decision in self._waiting
            if (decision.tenant, decision.model) != (tenant, model)
        )
        self._blocks = sum(decision.blocks for _, decision in self._waiting)

    def _pop(self) -> None:
        _, decision = self._waiting.popleft()
        self._blocks -= decision.blocks


class ReplicaReports:
    """Reports to one indexer. `run` is a task for as long as it is there."""

    def __init__(
        self,
        member: IndexerMember,
        *,
        resync: Callable[[Member[Any]], object],
        clock: Callable[[], float],
    ) -> None:
        self.member = member
        self.delivered = 0
        self.unknown = 0
        """Decisions about workers that it did not know."""
        self.problem = ""
        """Why nothing can be reported to it; "" = it can."""
        self.queue = DecisionQueue()
        self._resync = resync
        self._clock = clock
        self._refused: dict[tuple[str, str], tuple[str, float]] = {}
        """Tenants' models of which it took nothing: why, and until when nothing is reported of them."""
        self._wake = asyncio.Event()

    @property
    def lost(self) -> int:
        """Return the number of decisions that it missed."""
        return self.queue.lost + self.unknown

    def put(self, decision: Decision) -> None:
        """Queue a decision."""
        now = self._clock()
        _, until = self._refused.get((decision.tenant, decision.model), ("", now))
        if now >= until:
            self.queue.put(decision, now)
            self._wake.set()

    def problems(self) -> list[Warned]:
        """Return why nothing is reported to it, or not of some models; empty = all is."""
        own: list[Warned] = [self.problem] if self.problem else []
        return own + [TenantWarning(tenant, f"{model}: {why}") for (tenant, model), (why, _) in self._refused.items()]

    async def run(self) -> None:
        """Send what is queued, for ever."""
        loop, not_before = asyncio.get_running_loop(), 0.0
        while True:
            await self._wake.wait()
            if (pause := not_before - loop.time()) > 0:
                await asyncio.sleep(pause)
            reached = await self.send_batch()
            if not len(self.queue):
                self._wake.clear()
            not_before = loop.time() + (LINGER_SECONDS if reached else RETRY_SECONDS)

    async def send_batch(self) -> bool:
        """Send what fits into a message, one for each model; return False if the replica cannot be reached."""
        models: defaultdict[tuple[str, str], list[tuple[float, Decision]]] = defaultdict(list)
        for entry in self.queue.take(self._clock()):
            models[entry[1].tenant, entry[1].model].append(entry)
        while models:
            (tenant, model), entries = models.popitem()
            try:
                answer = await call(
                    self.member.stub.record_routing,
                    _message(tenant, model, [decision for _, decision in entries]),
                    timeout=CALL_SECONDS,
                )
            except (FailedPrecondition, Unimplemented) as error:
                self._refuses(tenant, model, error)
                continue
            except NotFound:
                self._not_known(len(entries))
            except KvscoutError as error:
                if not is_member_fault(error):
                    self._note(tenant, model, error, until=self._clock())
                    self.queue.lost += len(entries)
                    continue
                self._set_problem(str(error) or type(error).__name__)
                self.queue.restore(sorted((e for rest in (entries, *models.values()) for e in rest), key=_since))
                return False
            else:
                self._refused.pop((tenant, model), None)
                self._set_problem("")
                missed = len(answer.not_recorded)
                self.delivered += len(entries) - missed
                if missed:
                    self._not_known(missed)
        return True

    def _not_known(self, decisions: int) -> None:
        """Count decisions of workers that it does not know: it may have restarted, and is brought up to date."""
        self._set_problem("")
        self.unknown += decisions
        self._resync(self.member)

    def _refuses(self, tenant: str, model: str, error: KvscoutError) -> None:
        """Leave it alone about a model: it predicts nothing, or not with these workers' blocks."""
        self._note(tenant, model, error, until=self._clock() + REFUSAL_SECONDS)
        self.queue.forget(tenant, model)

    def _note(self, tenant: str, model: str, error: KvscoutError, *, until: float) -> None:
        if (tenant, model) not in self._refused:
            log.debug("%s takes no routing decisions of %s: %s", self.member.name, model, error)
        self._refused[tenant, model] = (str(error) or "takes no routing decisions", until)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _set_problem(self, problem: str) -> None:
        if problem and not self.problem:
            log.warning("routing decisions cannot be reported to %s: %s", self.member.name, problem)
        self.problem = problem


def _since(entry: tuple[float, Decision]) -> float:
    return entry[0]


def _message(tenant: str, model: str, decisions: Sequence[Decision]) -> bytes:
    kind, prompt = indexer_pb2.RecordRoutingRequest, indexer_pb2.RoutedPrompt
    fields = [kind(tenant=tenant, model=model).SerializeToString()]
    for decision in decisions:
        fixed = prompt(
            worker=rank_to_proto(decision.worker), block_size=decision.pool.block_size, eagle=decision.pool.eagle
        ).SerializeToString()
        hashes = bytes_field(prompt.BLOCK_HASHES_FIELD_NUMBER, decision.block_hashes)
        fields.append(bytes_field(kind.PROMPTS_FIELD_NUMBER, fixed + hashes))
    return b"".join(fields)
