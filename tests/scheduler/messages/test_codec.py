"""Operations as bytes against operations as objects: same answers, same state, whatever comes."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.scheduler_builders import BLOCK, MODEL, ManualClock, owner, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.errors import InvalidArgument, PermissionDenied
from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import AccessRole, Identity, enter, leave
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.settings.config import ServerConfig
from kvscout_scheduler.messages.codec import Codec
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.policies.builtin import Kv
from kvscout_scheduler.policies.decision_feed import DecisionWatcher
from kvscout_scheduler.rpc.lifecycle import carry_out_all
from kvscout_scheduler.rpc.operations import Operations
from kvscout_scheduler.rpc.servicer import SchedulerServicer
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.operations import Operation, Outcome
from kvscout_scheduler.values.reservation import End, Reservation

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: all paths are plain")
WORKERS = ("a", "b", "c")
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["messages", "packed"])


class Counting(Kv):
    """Keeps what Frees tell."""

    def __init__(self) -> None:
        self.output_tokens: list[int] = []
        self.prefills = 0

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        self.output_tokens.append(end.output_tokens)

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        self.prefills += 1


class Side:
    """A scheduler and one owner's stream to it."""

    def __init__(self, *, packed: bool, seed: int = 7, caller_tenant: str = "*", **settings: Any) -> None:
        specs = [worker(name, max_num_batched_tokens=1000, dp_size=1 + (name == "c")) for name in WORKERS]
        self.policy = Counting()
        policies = PolicyRegistry({"kv": lambda: self.policy})
        settings |= {"track_output_blocks": True}
        self.core: Scheduler = scheduler(*specs, clock=ManualClock(), seed=seed, policies=policies, **settings)
        self.core.workers.worker_added(worker("t", tenant="team", http_endpoint="http://t"))
        self.later = scheduler_pb2.LifecycleResponse()
        self.core.connect_owner(owner("gateway"), [])
        self._operations = Operations(self.core, owner("gateway"), self._told_later)
        self.codec = Codec("", caller_tenant, native=packed)

    def answer(self, message: scheduler_pb2.LifecycleRequest | bytes) -> scheduler_pb2.LifecycleResponse:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        results = carry_out_all(self._operations, self.codec, self.codec.read(raw))
        return scheduler_pb2.LifecycleResponse.FromString(b"".join(results or ()))

    def _told_later(self, number: int, operation: Operation, outcome: Outcome) -> None:
        self.later.MergeFromString(self.codec.write(number, operation, outcome))

    def reservation(self) -> list[Reservation]:
        return [each.reservation for each in self.core.bookings]

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
        caller=rng.choice(("", "search", "x" * 257) if rng.random() < 0.1 else ("", "search")),
        fairness_id=rng.choice(("", "a", "b")),
        deadline_ms=rng.choice((0, 0, 5, 2**32 - 1)),
        ttft_target_us=rng.choice((0, 0, 1, 500_000)),
        itl_target_us=rng.choice((0, 0, 30_000)),
        expected_output_tokens=rng.randrange(2) * 100,
        max_output_tokens=rng.choice((0, 4096, 2**32 - 1)),
        output_class=rng.choice(("", "", "chat", "chät/tools", "c" * 64, "c" * 65)),
        estimate_prefill_complete=rng.random() < 0.3,
        prefill_elsewhere=rng.random() < 0.1,
        lease_seconds=rng.choice((0, 0, 60, 10**6)),
        session=rng.choice((0, 0, 7, 2**64 - 1)),
        no_lineage=rng.random() < 0.2,
        overlaps_unknown=rng.random() < 0.2,
        parent_session=rng.choice((0, 0, 9, 2**64 - 1)),
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
        return {"free": reference, "output_tokens": rng.choice((0, 9))}
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
    plain, packed = Side(packed=False, **settings), Side(packed=True, **settings)
    for _ in range(1000):
        asked = message(*(random_operation(rng) for _ in range(rng.randrange(1, 6))))
        assert packed.answer(asked) == plain.answer(asked)
        assert packed.later == plain.later
        assert packed.state() == plain.state()
        assert packed.reservation() == plain.reservation()
    check_scheduler(packed.core)
    assert packed.core.stats.bookings == plain.core.stats.bookings > 0
    assert packed.policy.output_tokens == plain.policy.output_tokens != []


@BOTH
def test_overlaps_that_nobody_checked_yet_are_refused_in_the_same_words(packed: bool) -> None:
    overlaps = types_pb2.Overlaps(worker_ids=["a"], device_blocks=[5])
    selection = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=40, request_id="r", overlaps=overlaps)
    (result,) = Side(packed=packed).answer(message({"select_and_reserve": selection})).results
    assert "5 blocks overlap, the prompt has 2" in result.message


@BOTH
def test_a_watcher_that_wants_explanations_gets_them(packed: bool) -> None:
    side = Side(packed=packed)
    watcher = DecisionWatcher("*", "", True, lambda: None)
    side.core.decision_feed.add(watcher)
    overlaps = types_pb2.Overlaps(worker_ids=["b"], device_blocks=[1], host_blocks=[2])
    selection = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=40, request_id="r", overlaps=overlaps)
    assert side.answer(message({"select_and_reserve": selection})).results[0].HasField("select")
    (record,) = watcher.take()[1]
    assert record.decision is not None
    explanation = record.decision.explanation
    assert explanation is not None
    rows = {row.rank.worker_id: (row.device_blocks, row.host_blocks) for row in explanation.candidates}
    assert rows["b"] == (1, 2)


@BOTH
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        # A field that ends too soon, of the message, and of an operation of another kind.
        (b"\x1a\x09", "is no LifecycleRequest"),
        (b"\x1a\x04\x42\x02\x0a\x09", "is no Lifecycle"),
        (message(hello=scheduler_pb2.LifecycleHello(owner_id="x")), "hello: comes first, once"),
        (message(*({"free": ref("r")} for _ in range(1025))), "operations: 1025 in one message"),
    ],
    ids=["no message", "no operation", "hello", "many"],
)
def test_what_is_no_list_of_operations_is_refused(asked: Any, says: str, packed: bool) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Side(packed=packed).answer(asked)


@BOTH
def test_operations_name_no_tenant_but_the_callers(packed: bool) -> None:
    side = Side(packed=packed, caller_tenant="team")
    selection = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=40, request_id="r", tenant="team")
    entered = enter(Identity(AccessRole.CLIENT, "team"))
    try:
        assert side.answer(message({"select_and_reserve": selection}, tenant="team")).results[0].HasField("select")
        for other in (
            message({"free": ref("r")}),
            message({"free": ref("r", tenant="default")}, tenant="team"),
            message({"select": scheduler_pb2.SelectRequest(model=MODEL, tenant="other")}, tenant="team"),
        ):
            with pytest.raises(PermissionDenied):
                side.answer(other)
    finally:
        leave(entered)


async def test_unary_calls_as_bytes_are_answered_like_those_as_objects() -> None:
    rng = Random(test_seed())
    plain, packed = Side(packed=False).core, Side(packed=True).core
    registry = Registry(ManualClock())
    backends = Backends(registry, ServerConfig())
    objects, as_bytes = (SchedulerServicer(core, registry, backends) for core in (plain, packed))
    async with (
        serving(lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(objects, s)) as one,
        serving(as_bytes.add_to) as other,
    ):
        for number in range(300):
            asked = random_select(rng, f"r{number % 240}", rng.randrange(2))
            answers = [await _answer(scheduler_pb2_grpc.SchedulerStub(channel), asked) for channel in (one, other)]
            assert answers[0] == answers[1]
        bookings = [[each.reservation for each in core.bookings] for core in (plain, packed)]
        assert bookings[0] == bookings[1] != []
        assert {each.output_class for each in bookings[0]} >= {"", "chat"}
        assert {each.estimates_prefill for each in bookings[0]} == {True, False}
        assert all(len(each.output_class) <= 64 for each in bookings[0])


@BOTH
def test_classes_of_output_are_of_bounded_length(packed: bool) -> None:
    fields = {"model": MODEL, "isl_tokens": 40, "output_class": "c" * 65}
    selection = scheduler_pb2.SelectRequest(request_id="r", **fields)  # type: ignore[arg-type]
    booked = scheduler_pb2.ReserveRequest(request_id="q", worker=types_pb2.WorkerRank(worker_id="a"), **fields)  # type: ignore[arg-type]
    side = Side(packed=packed)
    for result in side.answer(message({"select_and_reserve": selection}, {"reserve": booked})).results:
        assert "output_class: must not be longer than 64 characters" in result.message
    selection.output_class = "c" * 64
    assert side.answer(message({"select_and_reserve": selection})).results[0].HasField("select")


async def _answer(stub: Any, asked: scheduler_pb2.SelectRequest) -> Any:
    try:
        return await stub.SelectAndReserve(asked, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


@BOTH
def test_what_a_gateway_books_again_is_in_its_phase_and_told_of_once_more_it_teaches_nothing(packed: bool) -> None:
    side = Side(packed=packed)

    def again(name: str, *, prefill_complete: bool) -> dict[str, Any]:
        made = scheduler_pb2.ReserveRequest(model=MODEL, request_id=name, isl_tokens=40)
        made.worker.worker_id, made.running, made.prefill_complete = "a", True, prefill_complete
        return {"reserve": made}

    answers = side.answer(
        message(
            again("r", prefill_complete=True),
            {"prefill_complete": ref("r")},  # as gateways send it to any scheduler, since older ones ignore the phase
            again("q", prefill_complete=False),
            {"prefill_complete": ref("q")},
        )
    ).results
    assert [answer.code for answer in answers] == [0] * 4
    changed = {answer.id: answer.prefill_complete.changed for answer in answers if answer.HasField("prefill_complete")}
    assert changed == {2: False, 4: True}
    assert side.policy.prefills == 1
    assert {each.reservation.key.request_id: each.reservation.running for each in side.core.bookings} == {
        "r": True,
        "q": True,
    }
