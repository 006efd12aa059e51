"""Short ways to build what the scheduler's tests need."""

from __future__ import annotations

from random import Random
from typing import Any

from kvscout_common.worker import ALL_TENANTS, Role, WorkerRank, WorkerSpec
from kvscout_scheduler.load.active_load import MakeLoad
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, Overlaps
from kvscout_scheduler.values.request import Prompt, SelectionRequest, WorkerConstraints, pack_hashes
from kvscout_scheduler.values.reservation import OwnerName, RequestKey, Reservation
from kvscout_scheduler.values.settings import SchedulerSettings

BLOCK = 16
MODEL = "m"


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def worker(worker_id: str, **fields: Any) -> WorkerSpec:
    """A worker of model "m" with blocks of 16."""
    return WorkerSpec(**{"worker_id": worker_id, "model": MODEL, "block_size": BLOCK, **fields})


def scheduler(
    *specs: WorkerSpec | str,
    clock: ManualClock | None = None,
    seed: int = 7,
    policies: PolicyRegistry | None = None,
    make_load: MakeLoad | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler with these workers; its policy is `kv`, whose costs can be added up in the head, if none is named."""
    made = Scheduler(
        SchedulerSettings(**{"policy": "kv", **settings}),
        clock=clock or ManualClock(),
        rng=Random(seed),
        policies=policies,
        make_load=make_load,
    )
    for spec in specs:
        made.workers.worker_added(worker(spec) if isinstance(spec, str) else spec)
    return made


def overlaps(**device_blocks: int) -> Overlaps:
    """Device overlaps by worker id."""
    return Overlaps(tuple(device_blocks), (), tuple(device_blocks.values()))


def request(
    hashes: list[int] | None = None,
    *,
    isl: int | None = None,
    on: Overlaps = NO_OVERLAPS,
    block_size: int = BLOCK,
    **fields: Any,
) -> SelectionRequest:
    """A request with these block hashes; its length is that of the blocks unless told. Fields of `WorkerConstraints`
    go there."""
    hashes = hashes or []
    length = len(hashes) * block_size if isl is None else isl
    prompt = Prompt(pack_hashes(hashes), overlaps=on)
    selection = {name: fields.pop(name) for name in WorkerConstraints._fields if name in fields}
    if "required_labels" in selection:
        selection["required_labels"] = frozenset(selection["required_labels"].items())
    if selection:
        fields["constraints"] = WorkerConstraints(**selection)
    return SelectionRequest(**{"model": MODEL, "isl_tokens": length, "prompt": prompt, **fields})


def key(request_id: str, role: Role = Role.AGGREGATED) -> RequestKey:
    """Name of a booking of model "m"."""
    return RequestKey("default", MODEL, role, request_id)


def owner(owner_id: str, tenant: str = ALL_TENANTS) -> OwnerName:
    """An owner of bookings, bound to no tenant unless told."""
    return OwnerName(tenant, owner_id)


def reservation(
    request_id: str,
    worker_id: str,
    isl: int,
    block_hashes: bytes = b"",
    attempt_id: int = 0,
    *,
    dp_rank: int = 0,
    cached_tokens: int = 0,
) -> Reservation:
    """What books a request on a worker."""
    rank = WorkerRank(worker_id, dp_rank)
    return Reservation(key(request_id), attempt_id, rank, isl, isl - cached_tokens, block_hashes=block_hashes)


def reserve(
    made: Scheduler,
    request_id: str,
    worker_id: str,
    hashes: list[int] | None = None,
    *,
    isl: int | None = None,
    cached_tokens: int = 0,
    attempt_id: int = 0,
) -> int:
    """Books a request on a worker."""
    hashes = hashes or []
    length = len(hashes) * BLOCK if isl is None else isl
    return made.reserve(
        reservation(request_id, worker_id, length, pack_hashes(hashes), attempt_id, cached_tokens=cached_tokens)
    )


def loads(made: Scheduler) -> dict[str, tuple[int, int, int]]:
    """(active requests, prefill tokens, decode blocks) of each worker of model "m", by worker id."""
    return {
        load.rank.worker_id: (load.active_requests, load.active_prefill_tokens, load.active_decode_blocks)
        for load in potential_loads(made, key("any").pool)
    }
