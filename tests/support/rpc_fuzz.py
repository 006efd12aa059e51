"""Every rpc of every service, called by a hostile tenant with random, damaged and half-sent messages, by every role.

`make fuzz` runs this for as long as it runs the rest; the test suite for seconds. Whatever comes, each service must
live, serve, keep its log free of tracebacks and its memory bounded, answer nothing with INTERNAL, and neither change
nor show anything of another tenant.

`FUZZ_SEED` makes the same calls again, each from its own number; how they interleave is not repeated.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from support.fuzz_callers import Callers, seconds_and_seed
from support.hostile_messages import HostileMessages
from support.hostile_world import CALLERS, HOSTILE, NOBODY, SECRET, SERVICES, HostileWorld, hostile_world, token_of

PARALLEL = 8
"""Calls at a time."""
UNARY_SECONDS = 20.0
"""A unary call that takes longer hangs."""
DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
CLIENTS_OWN = "Internal error from Core"
"""What grpc's client makes of a status that comes while it still writes."""
ENDPOINTS = [
    "", "http://127.0.0.1:1", "http://127.0.0.1:1/x?y#z", "http://[::1", "http://u:p@127.0.0.1:1", "ftp://x", "http://",
    "127.0.0.1:1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://*:1", "tcp://", "tcp://127.0.0.1", "inproc://x",
    "ipc://", "udp://127.0.0.1:1", "tcp://nowhere.invalid:5557", "http://nowhere.invalid",
]  # fmt: skip
WORDS: dict[str, list[str]] = {
    "tenant": [*[HOSTILE] * 12, "", "probe", "*", "default"],
    "model": [*["mock"] * 4, "m", "m2", "probe-m", "hidden-m"],
    "worker_id": [*(f"w{number}" for number in range(8)), "live", "live", "probe-w"],
    "request_id": [*(f"r{number}" for number in range(8)), "", "probe-r"],
    "owner_id": ["o1", "o2", "o3", "gateway", "probe-owner"],
    "policy": ["", "kv", "round-robin", "random", "least-loaded", "nobody's"],
    "clear": ["active_decode_blocks_threshold", "active_prefill_tokens_threshold", "model"],
    "lora_name": ["", "", "sql"],
    "cache_salt": ["", "", "salt"],
    "page_token": ["", "", "W10=", "WyJkZWZhdWx0IiwgImEiXQ=="],
}


def words_of(name: str) -> list[str]:
    """Likely values of a string field."""
    if "endpoint" in name or name == "bootstrap_host":
        return ENDPOINTS
    if name.endswith("worker_ids") or name == "pinned_worker_id":
        return WORDS["worker_id"]
    return WORDS.get(name, ["", "a", "zone"])


@dataclass(frozen=True, slots=True)
class Call:
    """One call; all of it follows from the seed and its number."""

    number: int
    service: str
    method: MethodDescriptor
    caller: str
    messages: tuple[bytes, ...]
    seconds: float
    half_closes: bool

    def __str__(self) -> str:
        shown = ", ".join(message[:200].hex() + ("…" if len(message) > 200 else "") for message in self.messages)
        return f"#{self.number} {self.service} {self.method.name} by {self.caller}: [{shown}]"


def make_call(seed: str, number: int) -> Call:
    """The call of a seed and number."""
    rng = random.Random(f"{seed}/{number}")
    service = rng.choice([*SERVICES, "scheduler", "indexer", "gateway"])
    (described,) = SERVICES[service].services_by_name.values()
    method = rng.choice(described.methods)
    make = HostileMessages(words_of, rng)
    streams = method.client_streaming
    messages: list[bytes] = []
    if streams and rng.random() < 0.8:
        messages = _conversation(make, method, rng)
    else:
        messages = [make.serialised(method.input_type) for _ in range(rng.choice([0, 1, 3]) if streams else 1)]
    endless = streams or method.server_streaming
    return Call(
        number,
        service,
        method,
        rng.choice([*CALLERS, *[HOSTILE + "-admin"] * 7, *[HOSTILE + "-client"] * 3]),
        tuple(messages),
        rng.choice([0.02, 0.2, 1.0]) if endless else UNARY_SECONDS,
        rng.random() < 0.7,
    )


def _conversation(make: HostileMessages, method: MethodDescriptor, rng: random.Random) -> list[bytes]:
    """Messages of a stream that agree with one another, until one does not."""
    made: list[Message] = []
    for number in range(rng.choice([1, 2, 3, 8])):
        message: Any = make.message(method.input_type)
        if number and rng.random() < 0.95:
            for name in ("worker_id", "dp_rank", "model", "tenant", "block_size", "eagle", "epoch", "version"):
                if name in message.DESCRIPTOR.fields_by_name:
                    setattr(message, name, getattr(made[0], name))
            if "hello" in message.DESCRIPTOR.fields_by_name:
                message.ClearField("hello")
        made.append(message)
    serialised = [message.SerializeToString() for message in made]
    if rng.random() < 0.2:
        serialised.append(make.serialised(method.input_type))
    return serialised


@dataclass(slots=True)
class Fuzz:
    """A run over one world."""

    world: HostileWorld
    codes: Counter[str] = field(default_factory=Counter)
    methods: set[str] = field(default_factory=set)

    async def send(self, call: Call) -> None:
        """Makes a call and judges the answer.

        Raises:
            AssertionError: A finding.
        """
        shape = "_".join(
            "stream" if streams else "unary" for streams in (call.method.client_streaming, call.method.server_streaming)
        )
        rpc: Any = getattr(self.world.channels[call.service, NOBODY], shape)
        path = f"/{call.method.containing_service.full_name}/{call.method.name}"
        arguments = () if call.method.client_streaming else call.messages
        token = () if call.caller == NOBODY else (("authorization", f"Bearer {token_of(call.caller)}"),)
        running: Any = rpc(path)(*arguments, timeout=call.seconds, metadata=token)
        writing = asyncio.create_task(_write(running, call)) if call.method.client_streaming else None
        answers = b""
        try:
            if call.method.server_streaming:
                while (answer := await running.read()) is not grpc.aio.EOF:
                    answers += answer
            else:
                answers = await running
            code, details = grpc.StatusCode.OK, ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.wait({writing})
        self.codes[code.name] += 1
        self.methods.add(f"{call.service}.{call.method.name}")
        assert code not in DEFECTS or details == CLIENTS_OWN, f"{code.name} {details!r}, answer to {call}"
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or call.seconds < UNARY_SECONDS, f"no answer to {call}"
        assert SECRET.encode() not in answers and SECRET not in details, (
            f"the probe's secret is in the answer to {call}"
        )


async def _write(running: Any, call: Call) -> None:
    try:
        for message in call.messages:
            await running.write(message)
        if call.half_closes:
            await running.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # it was answered meanwhile; the status says how


async def fuzz_rpcs(seconds: float, seed: str) -> Fuzz:
    """Starts everything and calls for so long.

    Raises:
        AssertionError: A finding.
    """
    async with hostile_world() as world:
        fuzz = Fuzz(world)
        await Callers(world, seed, make_call, fuzz.send, count=PARALLEL).run(seconds)
    return fuzz


def main() -> int:
    """Runs for `FUZZ_SECONDS`; 0 if nothing was found."""
    seconds, seed = seconds_and_seed()
    fuzz = asyncio.run(fuzz_rpcs(seconds, seed))
    print(f"{sum(fuzz.codes.values())} calls of {len(fuzz.methods)} rpcs, answered {dict(fuzz.codes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
