"""Recorders: what they are given, what they lose, and that nobody costs anything while nobody records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvscout_common.errors import InvalidArgument, ResourceExhausted
from kvscout_common.hashing import block_hashes_packed
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import Role, WorkerRank
from kvscout_gateway.request.attempt import Attempt
from kvscout_gateway.request.recording import KEPT_BYTES, MAX_RECORDERS, MESSAGE_BYTES, Recorder, Recording
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.output import Output
from kvscout_gateway.values.prompt import Geometry, Prompt
from kvscout_gateway.values.request import Request, TokenBody
from kvscout_gateway.values.session import Session

KEY = bytes(16)
TOKENS = 1_000


def request(**fields: Any) -> Request:
    usual: dict[str, Any] = {
        "model": "m", "tenant": "default", "prompt": Prompt(TOKENS), "body": TokenBody({}),
        "output": Output(max_tokens=7),
    }  # fmt: skip
    return Request(**(usual | fields))


def attempt(
    of: Request,
    *,
    worker: str = "w",
    usage: Usage | None = None,
    role: Role = Role.AGGREGATED,
    remote: bool = False,
    output: int = 5,
) -> Attempt:
    """What an attempt has when it is over."""
    blocks = block_hashes_packed(range(TOKENS), 16)
    decision = Decision("default", "m", WorkerRank(worker, 1), Geometry(16, False), blocks, overlap_blocks=4)
    asked = SimpleNamespace(role=role, remote_prefill=remote)
    made = SimpleNamespace(request=asked, decision=decision, usage=usage, output_tokens=output, ttft_seconds=0.5)
    return cast(Attempt, made)


def recorder(tenant: str = "*", model: str = "", tokens_per_hash: int = 0, key: bytes = KEY) -> Recorder:
    return Recorder(tenant, model, key, tokens_per_hash, lambda: None)


def recording(*recorders: Recorder) -> Recording:
    made = Recording(lambda: 12.0, lambda: 1_000.0)
    for one in recorders:
        made.add(one)
    return made


def test_a_request_is_recorded_with_its_decision_and_its_outcome() -> None:
    mine = recorder()
    one = request(session=Session(session_id=9), priority=-1)
    recording(mine).over(one, [attempt(one, usage=Usage(TOKENS, 64, 5))], "ok", started=10.0)
    message = mine.take()
    assert message is not None
    [made] = message.requests
    assert (made.arrived_unix_seconds, made.seconds, made.ttft_seconds) == (998.0, 2.0, 0.5)
    assert (made.model, made.tenant, made.priority, made.streamed, made.max_tokens) == ("m", "default", -1, True, 7)
    assert (made.prompt_tokens, made.output_tokens, made.cached_tokens, made.predicted_tokens) == (TOKENS, 5, 64, 64)
    assert (made.worker_id, made.dp_rank, made.outcome, made.tokens_per_hash) == ("w", 1, "ok", 64)
    assert len(made.prefix_hashes) == TOKENS // 64
    assert made.session not in (0, 9)
    assert mine.take() is None


def test_numbers_that_are_only_claimed_are_recorded_as_far_as_they_go() -> None:
    """No usage that an engine claims may keep a booking from being freed."""
    mine = recorder()
    for claimed in (2**40, 2**64, -1):
        one = request()
        run = attempt(one, usage=Usage(claimed, claimed, claimed), output=claimed)
        recording(mine).over(one, [run], "ok", started=10.0)
        message = mine.take()
        assert message is not None
        [made] = message.requests
        most = 0 if claimed < 0 else 2**32 - 1
        assert {made.prompt_tokens, made.cached_tokens, made.output_tokens} == {most}


def test_hashes_show_shared_prefixes_and_nothing_without_the_key() -> None:
    mine, fine, others = recorder(), recorder(tokens_per_hash=16), recorder(key=b"1" * 16)
    one = request()
    recording(mine, fine, others).over(one, [attempt(one)], "ok", started=10.0)
    hashes, finer, foreign = (list(each.take().requests[0].prefix_hashes) for each in (mine, fine, others))  # type: ignore[union-attr]
    assert finer[3::4][: len(hashes)] == hashes, "every fourth is the same prefix"
    assert not set(hashes) & set(foreign)
    plain = block_hashes_packed(range(TOKENS), 16)
    assert not {hash_.to_bytes(8, "little") for hash_ in finer} & {plain[at : at + 8] for at in range(0, len(plain), 8)}


def test_of_a_pair_the_prompt_is_the_prefill_workers_and_the_output_the_others() -> None:
    mine, one = recorder(), request()
    decode = attempt(one, worker="d", role=Role.DECODE, remote=True, usage=Usage(TOKENS, 992, 5))
    prefill = attempt(one, worker="p", role=Role.PREFILL, usage=Usage(TOKENS, 128, 1))
    recording(mine).over(one, [decode, prefill], "ok", started=10.0)
    message = mine.take()
    assert message is not None
    assert (message.requests[0].worker_id, message.requests[0].cached_tokens) == ("p", 128)
    assert message.requests[0].output_tokens == 5


def test_a_request_that_nobody_ran_is_recorded_without_worker_and_hashes() -> None:
    mine = recorder()
    recording(mine).over(request(), [], "Unavailable", started=11.0)
    message = mine.take()
    assert message is not None
    [made] = message.requests
    assert (made.worker_id, list(made.prefix_hashes), made.outcome) == ("", [], "Unavailable")
    assert not made.HasField("cached_tokens")


def test_each_recorder_gets_its_tenant_and_model() -> None:
    tenants, models = recorder(tenant="t"), recorder(model="n")
    all_of_them = recording(tenants, models)
    for one in (request(), request(tenant="t"), request(model="n")):
        all_of_them.over(one, [], "ok", started=11.0)
    for mine, seen in ((tenants, ("t", "m")), (models, ("default", "n"))):
        message = mine.take()
        assert message is not None
        assert [(made.tenant, made.model) for made in message.requests] == [seen]


def test_who_does_not_read_loses_the_oldest_and_is_told_how_many() -> None:
    mine, one = recorder(tokens_per_hash=16), request()
    all_of_them, ran = recording(mine), [attempt(one)]
    sent = 2 * KEPT_BYTES // (8 * TOKENS // 16)
    for number in range(sent):
        all_of_them.over(request(priority=number), ran, "ok", started=11.0)
    messages = []
    while (message := mine.take()) is not None:
        messages.append(message)
    assert max(message.ByteSize() for message in messages) < 2 * MESSAGE_BYTES
    read = [made.priority for message in messages for made in message.requests]
    assert 0 < messages[0].lost == sent - len(read)
    assert read == list(range(sent - len(read), sent)), "the newest, in order"
    assert not any(message.lost for message in messages[1:])


def test_nothing_is_made_while_nobody_records() -> None:
    recording().over(cast(Request, None), [], "ok", started=0.0)


def test_recorders_are_bounded() -> None:
    full = recording(*(recorder() for _ in range(MAX_RECORDERS)))
    with pytest.raises(ResourceExhausted, match="record already"):
        full.add(recorder())


@pytest.mark.parametrize(("arguments", "field"), [({"key": b"short"}, "key"), ({"tokens_per_hash": 70_000}, "tokens")])
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        recorder(**arguments)
