"""Operations as bytes against operations as objects: same answers, same state, whatever comes."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc
import pytest
from grpc_server import serving
from scheduler_builders import BLOCK, MODEL, ManualClock, owner, scheduler, test_seed, worker

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.config import ServerConfig
from kvscout_common.errors import InvalidArgument, PermissionDenied
from kvscout_common.hashing import native_available
from kvscout_common.identity import AccessRole, Identity, enter, leave
from kvscout_common.registry import Registry
from kvscout_common.registry_tasks import Backends
from kvscout_scheduler.operations import Operations
from kvscout_scheduler.packed_operations import PackedOperations
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.servicer import SchedulerServicer
from kvscout_scheduler.watching import Watcher

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: all paths are plain")
WORKERS = ("a", "b", "c")


class Side:
    """A scheduler and one owner's stream to it."""

    def __init__(self, *, seed: int = 7, caller_tenant: str = "*", **settings: Any) -> None:
        specs = [worker(name, max_num_batched_tokens=1000, dp_size=1 + (name == "c")) for name in WORKERS]
        self.core: Scheduler = scheduler(*specs, clock=ManualClock(), seed=seed, track_output_blocks=True, **settings)
        self.core.workers.worker_added(worker("t", tenant="team", http_endpoint="http://t"))
        self.later = scheduler_pb2.LifecycleResponse()
        self.core.connect_owner(owner("gateway"), [])
        self._plain = Operations(self.core, owner("gateway"), "", self.later.results.append)
        self._packed = PackedOperations(self.core, "", caller_tenant, self._plain, None)

    def plain(self, message: scheduler_pb2.LifecycleRequest) -> scheduler_pb2.LifecycleResponse:
        response = scheduler_pb2.LifecycleResponse()
        self._plain.carry_out(message.operations, response.results)
        return response

    def packed(self, message: scheduler_pb2.LifecycleRequest | bytes) -> scheduler_pb2.LifecycleResponse | None:
        """None: it was left to the plain path."""
        parts: list[bytes] = []
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        if not self._packed.carry_out(raw, parts):
            return None
        return scheduler_pb2.LifecycleResponse.FromString(b"".join(parts))

    def state(self) -> list[Any]:
        found = []
        for pool in self.core.workers:
            load = pool.load
            found.append((pool.id, list(load.requests), list(load.prefill_tokens), list(load.decode_blocks)))
        return found


def message(*operations: dict[str, Any], **fields: Any) -> scheduler_pb2.LifecycleRequest:
    made = [scheduler_pb2.LifecycleOperation(id=number, **each) for number, each in enumerate(operations, 1)]
    return scheduler_pb2.LifecycleRequest(operations=made, **fields)


def ref(request_id: str, **fields: Any) -> scheduler_pb2.RequestRef:
    return scheduler_pb2.RequestRef(**{"model": MODEL, "request_id": request_id, **fields})


def random_select(rng: Random, request_id: str, attempt_id: int) -> scheduler_pb2.SelectRequest:
    """Mostly usual, sometimes rare, sometimes wrong."""
    blocks = rng.randrange(6)
    made = scheduler_pb2.SelectRequest(
        model=rng.choice([MODEL] * 9 + ["gone"]),
        tenant=rng.choice(["", "", "", "default", "team"]),
        role=rng.choice([0] * 9 + [1, 2, 9]),  # type: ignore[arg-type]  # one that is none
        request_id=request_id,
        attempt_id=attempt_id,
        block_hashes=rng.choices((1, 2, 2**64 - 1), k=blocks),
        isl_tokens=max(1, blocks * BLOCK + rng.choice((0, 3, 3, -1))),
        block_size=rng.choice((0, 0, BLOCK, 32)),
        priority=rng.choice((0, 0, 5, -5)),
        expected_output_tokens=rng.randrange(2) * 100,
        prefill_elsewhere=rng.random() < 0.1,
        lease_seconds=rng.choice((0, 0, 60, 10**6)),
    )
    if rng.random() < 0.7:
        rows = rng.randrange(5)
        made.overlaps.worker_ids.extend(rng.choice((*WORKERS, "stranger")) for _ in range(rows))
        made.overlaps.device_blocks.extend(rng.randrange(blocks + 1) for _ in range(rows))
        for column in ("dp_ranks", "host_blocks", "disk_blocks", "external_blocks", "predicted_blocks"):
            if rng.random() < 0.15:
                length = rows if rng.random() < 0.9 else rows + 1
                getattr(made.overlaps, column).extend(rng.randrange(blocks + 1) for _ in range(length))
    if rng.random() < 0.15:
        rare = rng.choice(("pin", "excluded", "labels", "temperature", "explain", "lora"))
        if rare == "pin":
            made.pinned_worker_id = rng.choice(WORKERS)
        elif rare == "excluded":
            made.excluded_worker_ids.append("a")
        elif rare == "labels":
            made.required_labels["zone"] = "z"
        elif rare == "temperature":
            made.router_config_override.router_temperature = 0.5
        elif rare == "explain":
            made.explain = True
        else:
            made.lora_name = "sql"
    return made


def random_operation(rng: Random) -> dict[str, Any]:
    name, attempt = f"r{rng.randrange(40)}", rng.randrange(3)
    kind = rng.random()
    if kind < 0.4:
        return {"select_and_reserve": random_select(rng, name, attempt)}
    if kind < 0.45:
        return {"select": random_select(rng, "", 0)}
    reference = ref(name if rng.random() < 0.97 else "", attempt_id=attempt, tenant=rng.choice(("", "", "team")))
    if kind < 0.75:
        return {"free": reference}
    if kind < 0.9:
        return {"prefill_complete": reference}
    if kind < 0.95:
        output = scheduler_pb2.AddOutputRequest.FromString(reference.SerializeToString())
        output.blocks = 2
        return {"add_output": output}
    return {"renew": scheduler_pb2.RenewRequest(requests=[reference])} if kind < 0.98 else {}


@pytest.mark.parametrize("settings", [{}, {"queue_threshold": 0.1}], ids=["at once", "in line"])
def test_random_operations_have_the_same_results_and_leave_the_same_load(settings: dict[str, Any]) -> None:
    rng = Random(test_seed())
    plain, packed = Side(**settings), Side(**settings)
    for _ in range(1000):
        asked = message(*(random_operation(rng) for _ in range(rng.randrange(1, 6))))
        assert packed.packed(asked) == plain.plain(asked)
        assert packed.later == plain.later
        assert packed.state() == plain.state()
    packed.core.check_invariants()
    assert packed.core.stats.bookings == plain.core.stats.bookings > 0


def test_overlaps_that_nobody_checked_yet_are_refused_in_the_plain_path_s_words() -> None:
    plain, packed = Side(), Side()
    overlaps = types_pb2.Overlaps(worker_ids=["a"], device_blocks=[5])
    asked = message(
        {
            "select_and_reserve": scheduler_pb2.SelectRequest(
                model=MODEL, isl_tokens=40, request_id="r", overlaps=overlaps
            )
        }
    )
    answer = packed.packed(asked)
    assert answer == plain.plain(asked)
    assert answer is not None
    assert "5 blocks overlap, the prompt has 2" in answer.results[0].message


def test_a_watcher_that_wants_explanations_gets_them_of_packed_requests() -> None:
    side = Side()
    watcher = Watcher("*", "", True, lambda: None)
    side.core.watchers.add(watcher)
    overlaps = types_pb2.Overlaps(worker_ids=["b"], device_blocks=[1], host_blocks=[2])
    wanted = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=40, request_id="r", overlaps=overlaps)
    assert side.packed(message({"select_and_reserve": wanted})) is not None
    (record,) = watcher.take()[1]
    assert record.decision is not None
    explanation = record.decision.explanation
    assert explanation is not None
    rows = {row.rank.worker_id: (row.device_blocks, row.host_blocks) for row in explanation.candidates}
    assert rows["b"] == (1, 2)


def test_what_is_no_plain_list_of_operations_is_left_to_the_plain_path() -> None:
    side = Side()
    assert side.packed(b"\x1a\x09") is None
    assert side.packed(message(hello=scheduler_pb2.LifecycleHello(owner_id="x"))) is None
    assert side.packed(message(*({"free": ref("r")} for _ in range(1025)))) is None


def test_an_operation_that_is_no_message_is_refused() -> None:
    # An operation of another kind, whose content ends too soon.
    with pytest.raises(InvalidArgument):
        Side().packed(b"\x1a\x04\x42\x02\x0a\x09")


def test_operations_name_no_tenant_but_the_callers() -> None:
    side = Side(caller_tenant="team")
    wanted = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=40, request_id="r")
    mine = message({"select_and_reserve": wanted}, {"free": ref("r", tenant="team")}, tenant="team")
    assert side.packed(mine) is not None
    assert side.packed(message({"free": ref("r")})) is None
    assert side.packed(message({"free": ref("r", tenant="default")}, tenant="team")) is None
    entered = enter(Identity(AccessRole.CLIENT, "team"))
    try:
        with pytest.raises(PermissionDenied):
            side.packed(message({"select": scheduler_pb2.SelectRequest(model=MODEL, tenant="other")}, tenant="team"))
    finally:
        leave(entered)


async def test_unary_calls_as_bytes_are_answered_like_those_as_objects() -> None:
    rng = Random(test_seed())
    plain, packed = Side().core, Side().core
    registry = Registry(ManualClock())
    backends = Backends(registry, ServerConfig())
    objects, as_bytes = (SchedulerServicer(core, registry, backends) for core in (plain, packed))
    async with (
        serving(lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(objects, s)) as one,
        serving(as_bytes.add_to) as other,
    ):
        for number in range(100):
            asked = random_select(rng, f"r{number % 80}", rng.randrange(2))
            answers = [await _answer(scheduler_pb2_grpc.SchedulerStub(channel), asked) for channel in (one, other)]
            assert answers[0] == answers[1]
        bookings = [[core.bookings.listing(each, 0.0) for each in core.bookings] for core in (plain, packed)]
        assert bookings[0] == bookings[1] != []


async def _answer(stub: Any, asked: scheduler_pb2.SelectRequest) -> Any:
    try:
        return await stub.SelectAndReserve(asked, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
