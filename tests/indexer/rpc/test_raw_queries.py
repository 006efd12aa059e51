"""The raw handlers answer what the plain path answers, byte for byte, and leave to it what is unusual."""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support.engine_events import prompt
from support.grpc_server import serving
from support.indexer_client import BLOCK_SIZE, local_indexer
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_blocks.bytes.events import EventBatch, Stored, Tier
from kvscout_blocks.index.block_index import TWIN_LIMIT
from kvscout_common.errors import InvalidArgument, NotFound, PermissionDenied
from kvscout_common.hashing import block_hashes, native_available
from kvscout_common.identity.identity import AccessRole, Identity, enter, leave
from kvscout_common.rank_sets import rank_set
from kvscout_common.rpc.channel import call
from kvscout_common.worker import Transport, WorkerSpec
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer

SEED = test_seed()
RNG_TOKENS = 50


def servicer_of(indexer: Indexer) -> IndexerServicer:
    return IndexerServicer(indexer, None)


@pytest.fixture
async def indexer() -> AsyncIterator[Indexer]:
    async with local_indexer() as (_, indexer):
        yield indexer


def register(indexer: Indexer, worker_id: str, *, block_size: int = 4, model: str = "m", **fields: Any) -> WorkerSpec:
    spec = WorkerSpec(worker_id, model, block_size, transport=Transport.NONE, **fields)
    indexer.registry.register(spec)
    return spec


def fill(indexer: Indexer, spec: WorkerSpec, rng: random.Random) -> None:
    """Random chains on random tiers of every rank."""
    for rank in spec.ranks:
        for chain_number in range(3):
            length = rng.randrange(1, 6)
            tokens = tuple(rng.randrange(RNG_TOKENS) % 2 for _ in range(length * spec.block_size + spec.eagle))
            hashes = tuple(rng.getrandbits(64) for _ in range(length))
            for tier in rng.sample(sorted(Tier), rng.choice([1, 1, 2])):
                event = Stored(hashes, None, tokens, spec.block_size, tier, lora_name=rng.choice(["", "", "sql"]))
                events = [event]
                if rng.random() < 0.3:
                    # A window of which the last block, or the one before, is there.
                    window = replace(event, engine_hashes=hashes[-2:][:1], group=1, full_attention=False, window=4)
                    events = [window, event]
                indexer.pools.of(spec).apply(rank, EventBatch(tuple(events)), event_id=chain_number)
        if rng.random() < 0.3:
            hashes_held = [rng.getrandbits(64) for _ in range(3)]
            indexer.pools.of(spec).predict(rank, hashes_held, ttl_seconds=1000, now=0)


def random_request(rng: random.Random) -> indexer_pb2.FindMatchesRequest:
    request = indexer_pb2.FindMatchesRequest(
        model=rng.choice(["m", "m", "m", "two", "gone", ""]),
        tenant=rng.choice(["", "", "default", "t"]),
        id=rng.choice([0, 1, 2**40]),
        early_exit=rng.random() < 0.2,
        top_k=rng.choice([0, 0, 1, 2, 5, 100]),
    )
    if rng.random() < 0.5:
        request.block_size = rng.choice([4, 4, 8, 16, 0])
    if rng.random() < 0.2:
        request.eagle = rng.random() < 0.5
    if rng.random() < 0.7:
        request.token_ids.extend(rng.randrange(2) for _ in range(rng.randrange(40)))
        request.lora_name = rng.choice(["", "", "sql"])
        request.cache_salt = rng.choice(["", "", "x"])
        if rng.random() < 0.1:
            request.mm_items.add(id="a", length=2)
    if rng.random() < 0.3:
        request.block_hashes.extend(rng.getrandbits(64) for _ in range(rng.randrange(5)))
    elif request.token_ids and rng.random() < 0.3:
        # What is held is asked for by its hashes, too; sometimes with a length that they contradict.
        request.block_hashes.extend(block_hashes(request.token_ids, 4, lora_name=request.lora_name))
        request.prompt_tokens = rng.choice([0, 1, 4 * len(request.block_hashes), len(request.token_ids)])
        request.ClearField("token_ids")
        request.ClearField("lora_name")
        request.ClearField("cache_salt")
    if rng.random() < 0.05:
        request.prompt_tokens = 9
    return request


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is no raw path to compare")
async def test_random_requests_get_the_plain_path_s_bytes_or_are_left_to_it(indexer: Indexer) -> None:
    rng = random.Random(SEED)
    specs = [register(indexer, f"w{i}", dp_size=rng.choice([1, 1, 3])) for i in range(5)]
    specs += [register(indexer, "a", model="two"), register(indexer, "b", model="two", block_size=8, eagle=True)]
    specs += [register(indexer, "t", tenant="t")]
    for spec in specs:
        fill(indexer, spec, rng)
    register(indexer, "gone", model="gone")
    indexer.registry.remove("default", "gone")
    indexer.pools.set_incomplete(specs[1].pool, specs[1].ranks[0], True)
    # A limit keeps one more name of a block out.
    for spec in (specs[2], specs[-1]):
        twins = tuple(Stored((name,), local_hashes=(9,)) for name in range(10**6, 10**6 + TWIN_LIMIT + 1))
        indexer.pools.of(spec).apply(spec.ranks[0], EventBatch(twins))
    servicer = servicer_of(indexer)
    assert indexer.queries is not None
    native = 0
    for _ in range(2000):
        request = random_request(rng)
        raw = indexer.queries.answer(request.SerializeToString(), now=1.0, caller_tenant="*")
        if raw is None:
            continue
        native += 1
        plain = servicer.find(request, request.tenant)
        answered = indexer_pb2.FindMatchesResponse.FromString(raw)
        assert _by_worker(answered) == _by_worker(plain), f"KVSCOUT_TEST_SEED={SEED}: {request}"
        assert len(raw) == plain.ByteSize(), f"KVSCOUT_TEST_SEED={SEED}: {request}"
        if request.block_hashes and not request.early_exit:
            assert _found(indexer, request) == answered, f"KVSCOUT_TEST_SEED={SEED}: {request}"
        stream = indexer_pb2.StreamFindMatchesRequest(requests=[request, request])
        raw_stream = indexer.queries.answer_stream(stream.SerializeToString(), now=1.0, caller_tenant="*")
        assert raw_stream is not None
        streamed = indexer_pb2.StreamFindMatchesResponse.FromString(raw_stream).results
        assert [(r.id, r.code, r.response) for r in streamed] == [(request.id, 0, answered)] * 2
    assert native > 300, f"KVSCOUT_TEST_SEED={SEED}"


def _found(indexer: Indexer, request: indexer_pb2.FindMatchesRequest) -> indexer_pb2.FindMatchesResponse:
    """The answer to a request of hashes as a caller in this process gets it, without a message."""
    named = {name: getattr(request, name) if request.HasField(name) else None for name in ("block_size", "eagle")}
    pool = indexer.pools.find(request.tenant or "default", request.model, **named)
    assert pool is not None
    assert indexer.queries is not None
    hashes = array("Q", request.block_hashes).tobytes()
    found = indexer.queries.find(pool[0], hashes, request.prompt_tokens, top_k=request.top_k, now=1.0)
    assert found is not None
    native, lower_bound, incomplete_rows, ranks = found
    assert ranks == rank_set(pool[1].workers())
    names = [column.name for column in types_pb2.Overlaps.DESCRIPTOR.fields if column.name != "others"]
    columns: dict[str, Any] = dict(zip(names, native.columns, strict=True))
    overlaps = types_pb2.Overlaps(**columns)
    predicts = bool(overlaps.predicted_blocks)
    if native.others is not None:
        # How many, and whether all have it exactly, is said in messages alone.
        said = indexer_pb2.FindMatchesResponse.FromString(
            indexer.queries.answer(request.SerializeToString(), now=1.0, caller_tenant="*") or b""
        ).overlaps.others
        overlaps.others.CopyFrom(said)
        assert native.others == tuple(getattr(said, name) for name in names[2:])
        predicts |= native.others[4] > native.others[0]
        assert said.ranks_digest == ranks.digest
    assert native.has_predictions == predicts
    return indexer_pb2.FindMatchesResponse(
        overlaps=overlaps,
        num_blocks=len(request.block_hashes),
        block_size=pool[0].block_size,
        lower_bound=lower_bound,
        incomplete_rows=incomplete_rows,
    )


def _by_worker(response: indexer_pb2.FindMatchesResponse) -> Any:
    """An answer without the order of its rows, which is open."""
    columns = response.overlaps
    rank_of = list(columns.dp_ranks) or [0] * len(columns.worker_ids)
    names = list(zip(columns.worker_ids, rank_of, strict=True))
    tiers = (columns.device_blocks, columns.host_blocks, columns.disk_blocks, columns.external_blocks)
    rows = [
        (name, [column[row] if column else None for column in (*tiers, columns.predicted_blocks)])
        for row, name in enumerate(names)
    ]
    incomplete = sorted(names[row] for row in response.incomplete_rows)
    return sorted(rows), incomplete, response.num_blocks, response.block_size, response.lower_bound, columns.others


async def raw_channel(indexer: Indexer) -> Any:
    return serving(IndexerServicer(indexer, indexer.queries).add_to)


async def test_errors_are_those_of_the_plain_path(indexer: Indexer) -> None:
    register(indexer, "w")
    async with await raw_channel(indexer) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        with pytest.raises(NotFound, match="unknown"):
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest(model="unknown"))
        with pytest.raises(InvalidArgument, match="token_ids"):
            both = indexer_pb2.FindMatchesRequest(model="m", token_ids=[1], block_hashes=[1])
            await call(stub.FindMatches, both)
        with pytest.raises(InvalidArgument, match="prompt_tokens"):
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest(model="m", prompt_tokens=1, token_ids=[1]))
        with pytest.raises(InvalidArgument, match="prompt_tokens"):
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest(model="m", prompt_tokens=3, block_hashes=[1]))
        garbage = channel.unary_unary("/kvscout.v1.Indexer/FindMatches")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await garbage(b"\x0a\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_failing_operation_costs_itself_and_not_its_stream(indexer: Indexer) -> None:
    register(indexer, "w")
    requests = [
        indexer_pb2.FindMatchesRequest(model="m", id=1, token_ids=range(8)),
        indexer_pb2.FindMatchesRequest(model="unknown", id=2),
        indexer_pb2.FindMatchesRequest(model="m", id=3, block_size=0),
    ]
    async with await raw_channel(indexer) as channel:
        running = indexer_pb2_grpc.IndexerStub(channel).StreamFindMatches(
            iter([indexer_pb2.StreamFindMatchesRequest(requests=requests)] * 2)
        )
        for _ in range(2):
            results = (await running.read()).results
            codes = {result.id: result.code for result in results}
            assert codes == {
                1: 0,
                2: grpc.StatusCode.NOT_FOUND.value[0],
                3: grpc.StatusCode.INVALID_ARGUMENT.value[0],
            }
            assert next(r for r in results if r.id == 1).response.num_blocks == 2


async def test_too_many_operations_in_a_message_are_refused(indexer: Indexer) -> None:
    register(indexer, "w")
    message = indexer_pb2.StreamFindMatchesRequest(requests=[indexer_pb2.FindMatchesRequest(model="m")] * 1025)
    async with await raw_channel(indexer) as channel:
        running = indexer_pb2_grpc.IndexerStub(channel).StreamFindMatches(iter([message]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "requests" in str(caught.value.details())


async def test_a_caller_of_another_tenant_is_refused(indexer: Indexer) -> None:
    register(indexer, "w")
    raw = IndexerServicer(indexer, indexer.queries)
    entered = enter(Identity(AccessRole.CLIENT, "t"))
    try:
        request = indexer_pb2.FindMatchesRequest(model="m", block_hashes=[1]).SerializeToString()
        with pytest.raises(PermissionDenied):
            raw.find_matches(request)
    finally:
        leave(entered)


async def test_without_the_extension_the_plain_path_answers(indexer: Indexer) -> None:
    register(indexer, "w", block_size=BLOCK_SIZE)
    raw = IndexerServicer(indexer, None)
    request = indexer_pb2.FindMatchesRequest(model="m", token_ids=prompt(2))
    answer = indexer_pb2.FindMatchesResponse.FromString(raw.find_matches(request.SerializeToString()))
    assert (answer.num_blocks, answer.block_size) == (2, BLOCK_SIZE)
