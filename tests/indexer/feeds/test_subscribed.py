"""Engines that are served over gRPC, read by an indexer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import trustme
from support.engine_events import CLEARED, batch, chain, prompt, removed, stored
from support.indexer_client import IndexerClient, local_indexer
from support.processes import eventually
from support.subscribed_engine import End, Keeps, SubscribedEngine, subscribed_engine
from support.tcp_relay import tcp_relay

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_blocks.bytes import subscribed
from kvscout_blocks.source import subscribed_feed
from kvscout_common import transport
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc import channel
from kvscout_common.transport import keepalive
from kvscout_indexer.config import IndexerConfig

LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE
DISCONNECTED = indexer_pb2.SOURCE_STATE_DISCONNECTED
MISCONFIGURED = indexer_pb2.SOURCE_STATE_MISCONFIGURED
WAITING = indexer_pb2.SOURCE_STATE_WAITING


@pytest.fixture(params=list(transport.Transport), ids=str)
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels of either kind."""
    if request.param is transport.Transport.NATIVE and not native_available():
        pytest.skip("the extension is not built")
    monkeypatch.setattr(transport, "_chosen", request.param)


@pytest.fixture
async def client(over: None) -> AsyncIterator[IndexerClient]:
    """An indexer."""
    async with local_indexer() as (started, _):
        yield started


@pytest.fixture
async def stack(client: IndexerClient) -> AsyncIterator[AsyncExitStack]:
    """What ends before the indexer."""
    async with AsyncExitStack() as entered:
        yield entered


async def begun(engine: SubscribedEngine, streams: int = 1) -> None:
    """Wait for streams."""

    async def there() -> bool:
        return engine.streams == streams

    await eventually(there, what=f"{streams} streams")


async def read(
    stack: AsyncExitStack,
    client: IndexerClient,
    engine: SubscribedEngine,
    *,
    dp_size: int = 1,
    kind: workers_pb2.EngineKind.ValueType = workers_pb2.ENGINE_KIND_VLLM,
) -> SubscribedEngine:
    """Serve and register an engine, and wait for the stream."""
    await stack.enter_async_context(subscribed_engine(engine))
    await client.register(engine, dp_size=dp_size, engine=kind)
    await begun(engine)
    return engine


@pytest.mark.parametrize(
    ("kind", "service"),
    [
        (workers_pb2.ENGINE_KIND_VLLM, "vllm.grpc.engine.VllmEngine"),
        (workers_pb2.ENGINE_KIND_SGLANG, "sglang.grpc.scheduler.SglangScheduler"),
        (workers_pb2.ENGINE_KIND_MOCK, "vllm.grpc.engine.VllmEngine"),
    ],
)
async def test_one_stream_brings_the_events_of_all_ranks(
    stack: AsyncExitStack, client: IndexerClient, kind: workers_pb2.EngineKind.ValueType, service: str
) -> None:
    engine = await read(stack, client, SubscribedEngine(ranks=2), dp_size=2, kind=kind)
    for payload in chain(3):
        engine.publish_payload(payload)
    engine.publish(stored([7, 8], prompt(2)), rank=1)
    status = await client.until_applied(2)
    await client.until_applied(0, dp_rank=1)
    assert await client.overlaps(prompt(4)) == {("w", 0): 3, ("w", 1): 2}
    assert (status.state, status.endpoint) == (LIVE, engine.endpoint)
    assert status.transport == workers_pb2.EVENT_TRANSPORT_SUBSCRIBE
    assert engine.calls == [(f"/{service}/SubscribeKvEvents", 0)]


async def test_the_numbers_of_tensorrt_llm_say_nothing_of_what_came_before(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine()
    await read(stack, client, engine, dp_size=2, kind=workers_pb2.ENGINE_KIND_TRTLLM)
    for number, payload in enumerate(chain(4)):
        message = engine.make(payload)
        message.dp_rank = number // 2
        engine.send(message)
    for rank in (0, 1):
        status = await client.until_applied(1, dp_rank=rank)
        assert status.reason == "events are missing: what the engine announced before this stream began"
    assert await client.overlaps(prompt(4)) == {("w", 0): 2}
    assert engine.calls == [("/trtllm.TrtllmService/SubscribeKvEvents", 0)]
    # A number that is left out may be of either rank: the stream begins anew.
    engine.make(chain(1)[0])
    engine.publish_payload(chain(1)[0])
    await client.until(lambda s: s.demotions == 1)
    await client.until(lambda s: s.demotions == 1, dp_rank=1)


async def test_removed_and_cleared_blocks_go(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = await read(stack, client, SubscribedEngine())
    for payload in chain(4):
        engine.publish_payload(payload)
    engine.publish(removed([3, 4]))
    await client.until_applied(4)
    assert await client.overlap(prompt(4)) == 2
    engine.publish(CLEARED)
    await client.until_applied(5)
    assert await client.overlap(prompt(4)) == 0


async def test_an_engine_that_has_run_before_is_known_from_now_on_only(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine()
    for payload in chain(2):
        engine.make(payload)
    await read(stack, client, engine)
    engine.publish(stored([9], prompt(1, first=901)))
    status = await client.until_applied(2)
    assert (status.state, status.reason) == (INCOMPLETE, "events are missing: 0..1")
    matches = await client.matches(prompt(1, first=901))
    assert matches.lower_bound
    # The engine says that nothing of the past is there any more.
    engine.publish(CLEARED)
    assert (await client.until_applied(3)).state == LIVE


async def test_a_server_that_keeps_all_batches_leaves_nothing_unknown(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine(keeps=Keeps.BATCHES)
    for payload in chain(5):
        engine.make(payload)
    await read(stack, client, engine)
    assert (await client.until_applied(4)).state == LIVE
    assert await client.overlap(prompt(5)) == 5
    # And again after the connection was lost, whatever went on meanwhile.
    engine.end(grpc.StatusCode.UNAVAILABLE)
    engine.make(batch(removed([5])))
    await client.until_applied(5)
    assert (await client.status()).state == LIVE
    assert await client.overlap(prompt(5)) == 4


async def test_a_server_that_keeps_the_state_sends_it_to_whoever_comes_late(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine(keeps=Keeps.STATE)
    for payload in chain(6):
        engine.make(payload)
    await read(stack, client, engine)
    status = await client.until_applied(5)
    assert (status.state, status.reason) == (LIVE, "")
    engine.publish(removed([6]))
    await client.until_applied(6)
    assert await client.overlap(prompt(6)) == 5
    assert not (await client.matches(prompt(6))).lower_bound


async def test_a_state_replaces_what_was_known_before_the_stream_was_lost(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine(keeps=Keeps.STATE))
    for payload in chain(3):
        engine.publish_payload(payload)
    await client.until_applied(2)
    engine.make(batch(removed([2, 3])))
    engine.make(batch(stored([20], prompt(1, first=501))))
    engine.end(grpc.StatusCode.UNAVAILABLE)
    assert (await client.until_applied(4)).state == LIVE
    assert await client.overlap(prompt(3)) == 1
    assert await client.overlap(prompt(1, first=501)) == 1


async def test_a_server_that_came_later_than_the_engine_has_a_lower_bound(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine(keeps=Keeps.STATE)
    engine.unknown_before = 17
    for payload in chain(2):
        engine.make(payload)
    await read(stack, client, engine)
    status = await client.until(lambda s: s.state == INCOMPLETE and s.last_event_id == 1)
    assert status.reason == "events are missing: 17 batches that the engine's gRPC server never saw"
    assert await client.overlap(prompt(2)) == 2


async def test_a_state_of_which_the_rest_does_not_come_is_a_lower_bound(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = SubscribedEngine()
    for payload in chain(3):
        engine.make(payload)
    await read(stack, client, engine)
    engine.send(*engine.state(0)[:2])
    status = await client.until(lambda s: s.state == INCOMPLETE and s.last_event_id == 1)
    assert status.reason == "events are missing: the rest of the state that the engine sends"
    assert await client.overlap(prompt(3)) == 2


async def test_after_data_loss_what_was_known_is_a_prediction(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = await read(stack, client, SubscribedEngine())
    for payload in chain(2):
        engine.publish_payload(payload)
    await client.until_applied(1)
    for payload in chain(4)[2:]:
        engine.make(payload)
    engine.end(grpc.StatusCode.DATA_LOSS, "rank 0 skipped from 1 to 4 and has no replay endpoint")
    await begun(engine)
    engine.publish(stored([9], prompt(1, first=901)))
    status = await client.until_applied(4)
    assert (status.state, status.demotions > 0) == (INCOMPLETE, True)
    matches = await client.matches(prompt(2))
    assert (list(matches.overlaps.device_blocks), list(matches.overlaps.predicted_blocks)) == ([0], [2])
    assert await client.overlap(prompt(1, first=901)) == 1


@pytest.mark.parametrize("keeps", list(Keeps), ids=lambda keeps: keeps.name)
async def test_an_engine_that_restarts_is_known_from_its_first_batch(
    stack: AsyncExitStack, client: IndexerClient, keeps: Keeps
) -> None:
    engine = await read(stack, client, SubscribedEngine(keeps=keeps))
    for payload in chain(5):
        engine.publish_payload(payload)
    await client.until_applied(4)
    engine.restart()
    await begun(engine)
    engine.publish(stored([50], prompt(1, first=501)))
    engine.publish(stored([51], prompt(1, first=601)))
    assert (await client.until_applied(1)).state == LIVE
    assert await client.overlap(prompt(5)) == 0
    assert await client.overlap(prompt(1, first=601)) == 1


async def test_a_restart_that_the_server_does_not_notice_is_seen_by_its_numbers(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine())
    for payload in chain(3):
        engine.publish_payload(payload)
    await client.until_applied(2)
    fresh = SubscribedEngine()
    engine.send(fresh.make(batch(stored([70], prompt(1, first=701)))))
    assert (await client.until_applied(0)).state == LIVE
    assert await client.overlap(prompt(3)) == 0
    assert await client.overlap(prompt(1, first=701)) == 1


async def test_repeated_batches_and_reports_of_the_load_change_nothing(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine())
    first = engine.make(chain(1)[0])
    heartbeat = type(first)(sequence_number=first.sequence_number)
    heartbeat.load.load_only = True
    engine.send(heartbeat, first, first, heartbeat)
    engine.publish_payload(chain(2)[1])
    status = await client.until_applied(1)
    assert (status.state, status.applied, status.blocks) == (LIVE, 2, 2)


async def test_an_engine_without_the_stream_is_misconfigured_and_says_why(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "REFUSED_PAUSE_SECONDS", 0.05)
    engine = SubscribedEngine()
    engine.refusal = End(grpc.StatusCode.UNIMPLEMENTED, "KV cache events not enabled")
    await stack.enter_async_context(subscribed_engine(engine))
    await client.register(engine)
    status = await client.until(lambda s: s.state == MISCONFIGURED)
    assert status.reason == (
        f"{engine.endpoint}: KV cache events not enabled (it has no SubscribeKvEvents, or KV events are off)"
    )
    # It is started again with them.
    engine.refusal = None
    await begun(engine)
    assert (await client.until(lambda s: s.state == WAITING)).reason.startswith("no event has arrived yet")
    engine.publish_payload(chain(1)[0])
    assert (await client.until_applied(0)).state == LIVE


async def test_a_refusal_is_shown_and_tried_again(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = SubscribedEngine()
    engine.refusal = End(grpc.StatusCode.OUT_OF_RANGE, "no socket")
    await stack.enter_async_context(subscribed_engine(engine))
    await client.register(engine)
    status = await client.until(lambda s: s.state == DISCONNECTED and "OUT_OF_RANGE" in s.reason)
    assert status.reason == f"{engine.endpoint}: no socket (OUT_OF_RANGE)"
    engine.refusal = None
    await begun(engine)


async def test_an_engine_that_comes_later_is_read_then(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = SubscribedEngine()
    async with subscribed_engine(engine):
        pass
    await client.register(engine)
    await client.until(lambda s: s.state == DISCONNECTED and engine.endpoint in s.reason)
    await stack.enter_async_context(subscribed_engine(engine, port=int(engine.endpoint.rpartition(":")[2])))
    await begun(engine)
    engine.publish_payload(chain(1)[0])
    assert (await client.until_applied(0)).state == LIVE


async def test_events_of_a_rank_that_is_not_registered_are_reported(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine(ranks=2))
    engine.publish(stored([1], prompt(1)), rank=1)
    status = await client.until(lambda s: s.state == MISCONFIGURED)
    assert status.reason == "the engine has events of rank 1, which is not registered"
    assert await client.overlap(prompt(1)) == 0


async def test_a_server_that_does_not_answer_is_reported(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "ANSWER_SECONDS", 0.05)
    engine = SubscribedEngine()
    engine.silent = True
    await read(stack, client, engine)
    await client.until(lambda s: s.state == DISCONNECTED and s.reason == f"{engine.endpoint} does not answer")


async def test_a_server_whose_reports_of_the_load_end_is_called_anew(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "SILENCE_SECONDS", 0.3)
    engine = await read(stack, client, SubscribedEngine())
    message = engine.make(chain(1)[0])
    message.load.SetInParent()
    engine.send(message)
    await client.until_applied(0)

    async def called_again() -> bool:
        return len(engine.calls) > 1

    await eventually(called_again, what="another call")


async def test_a_connection_that_is_half_open_ends(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "ENGINE_TIME_MS", 1_000)
    options = tuple((name, 1_000 if "timeout" in name else value) for name, value in keepalive.CLIENT_OPTIONS)
    monkeypatch.setattr(channel, "CLIENT_OPTIONS", options)
    engine = SubscribedEngine()
    await stack.enter_async_context(subscribed_engine(engine))
    relay = await stack.enter_async_context(tcp_relay(engine.endpoint.removeprefix("grpc://")))
    engine.endpoint = f"grpc://{relay.address}"
    await client.register(engine)
    await begun(engine)
    engine.publish_payload(chain(1)[0])
    await client.until_applied(0)
    relay.swallow()
    await client.until(lambda s: s.state == DISCONNECTED)
    relay.heal()
    await client.until(lambda s: s.state == INCOMPLETE)


async def test_a_message_that_is_too_long_ends_the_stream(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "MAX_MESSAGE_BYTES", 4096)
    engine = await read(stack, client, SubscribedEngine())
    engine.send(b"\x00" * 5000)
    status = await client.until(lambda s: s.state == DISCONNECTED)
    assert "RESOURCE_EXHAUSTED" in status.reason


async def test_messages_that_are_none_are_counted_and_cost_no_other(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine())
    engine.send(b"\x1a\xff", b"\xff")
    engine.publish_payload(chain(1)[0])
    status = await client.until_applied(0)
    assert (status.malformed, await client.overlap(prompt(1))) == (2, 1)


async def test_a_large_message_is_read_beside_the_event_loop(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribed_feed, "INLINE_BYTES", 0)
    engine = await read(stack, client, SubscribedEngine())
    for payload in chain(3):
        engine.publish_payload(payload)
    await client.until_applied(2)
    assert await client.overlap(prompt(3)) == 3


async def test_numbers_that_go_back_again_and_again_are_two_publishers(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine())
    others = [SubscribedEngine() for _ in range(12)]
    for number, other in enumerate(others):
        engine.send(other.make(batch(stored([number], prompt(1, first=1 + 100 * number)))))
    await client.until(lambda s: s.state == MISCONFIGURED and "two" in s.reason)


async def test_a_batch_beyond_the_limits_is_counted_and_its_number_is_used(
    stack: AsyncExitStack, client: IndexerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await read(stack, client, SubscribedEngine())
    monkeypatch.setattr(subscribed, "MAX_BLOCKS", 3)
    engine.publish(stored([1, 2, 3, 4], prompt(4)))
    engine.publish(stored([9], prompt(1, first=901)))
    status = await client.until_applied(1)
    assert (status.malformed, await client.overlap(prompt(4))) == (1, 0)


async def test_the_stream_ends_with_the_registration_and_moves_with_it(
    stack: AsyncExitStack, client: IndexerClient
) -> None:
    engine = await read(stack, client, SubscribedEngine(ranks=2), dp_size=2)
    other = await stack.enter_async_context(subscribed_engine(SubscribedEngine(ranks=2)))
    await client.register(other, dp_size=2, engine=workers_pb2.ENGINE_KIND_VLLM, update=True)
    await begun(other)
    await begun(engine, 0)
    other.publish(stored([1], prompt(1)), rank=1)
    await client.until_applied(0, dp_rank=1)
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
    await begun(other, 0)


async def test_a_pool_with_eagle_is_not_read_and_says_why(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = await stack.enter_async_context(subscribed_engine(SubscribedEngine()))
    await client.register(engine, eagle=True)
    status = await client.until(lambda s: s.state == MISCONFIGURED)
    assert status.reason.startswith("SubscribeKvEvents leaves out the token after each block")
    assert engine.calls == []


async def test_over_tls_the_server_is_verified_and_gets_no_token_of_ours(over: None, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "token").write_text("secret")
    issued = authority.issue_cert("127.0.0.1")
    key, chained = issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    security = ClientSecurity(ca=tmp_path / "ca.pem", token_file=tmp_path / "token")
    async with (
        local_indexer(IndexerConfig(client=security)) as (client, _),
        subscribed_engine(SubscribedEngine(), tls=grpc.ssl_server_credentials([(key, chained)])) as engine,
    ):
        await client.register(engine)
        await begun(engine)
        engine.publish_payload(chain(1)[0])
        assert (await client.until_applied(0)).state == LIVE
        assert "authorization" not in engine.metadata[0]
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        engine.end(grpc.StatusCode.UNAVAILABLE)
        await client.until(lambda s: s.state == DISCONNECTED and "certificate" in s.reason.lower())


async def test_tls_needs_a_ca(stack: AsyncExitStack, client: IndexerClient) -> None:
    engine = await stack.enter_async_context(subscribed_engine(SubscribedEngine()))
    engine.endpoint = engine.endpoint.replace("grpc://", "grpcs://")
    await client.register(engine)
    status = await client.until(lambda s: s.state == MISCONFIGURED)
    assert status.reason == f"{engine.endpoint} needs --tls-ca"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"engine": workers_pb2.ENGINE_KIND_CUSTOM}, "engine"),
        ({"topic": "kv"}, "event_endpoints[0].topic"),
        ({"bind": True}, "event_endpoints[0].bind"),
        ({"transport": workers_pb2.EVENT_TRANSPORT_ZMQ}, "event_endpoints[0].endpoint"),
    ],
)
async def test_what_does_not_fit_a_stream_is_refused(
    client: IndexerClient, fields: dict[str, object], field: str
) -> None:
    engine = SubscribedEngine()
    engine.endpoint = "grpc://127.0.0.1:1"
    with pytest.raises(InvalidArgument) as caught:
        await client.register(engine, **fields)  # type: ignore[arg-type]
    assert caught.value.field == field
