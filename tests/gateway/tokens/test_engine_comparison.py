"""What engines count, cache and tokenize beside what is known here."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from kvscout_common.errors import Unavailable
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.tokens.engine_comparison import EngineComparison
from kvscout_gateway.tokens.parity import MAX_MISMATCHES, ParityCheck
from kvscout_gateway.tokens.remote_tokens import Call, RemoteTokens, Server
from kvscout_gateway.tokens.rendered import Rendered
from kvscout_gateway.tokens.source import TokenRequest
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry, Prompt, TokenClass

OF = TokenClass("a", "m", "chat", False, "tokenizer")
TOKENS = array("I", range(100)).tobytes()
WANTED = TokenRequest({"messages": [{"role": "user", "content": "hi"}]}, "chat", "m", "a", 1)


class Tokenizes:
    """An engine's /tokenize."""

    def __init__(self, tokens: bytes | None = TOKENS) -> None:
        self.tokens = tokens
        self.asked: list[str] = []

    async def fetch(self, server: Server, call: Call) -> Rendered:
        self.asked.append(server.endpoint + call.path)
        if self.tokens is None:
            raise Unavailable("no")
        return Rendered(self.tokens)


def comparison(engine: Tokenizes) -> tuple[EngineComparison, ParityCheck]:
    parity = ParityCheck(CollectorRegistry(), every=1 << 30)
    return EngineComparison(parity, cast(RemoteTokens, engine), lambda: ()), parity


def prompt(**fields: Any) -> Prompt:
    made = Prompt.of_tokens(TOKENS)
    made.token_class = OF
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def decision(confirmed: int | None = 2, role: Role = Role.AGGREGATED) -> Decision:
    spec = WorkerSpec("w", model="m", block_size=16, http_endpoint="http://x", role=role)
    where = Decision("a", "m", WorkerRank("w", 0), Geometry(16, eagle=False), b"", endpoint="http://x", spec=spec)
    where.confirmed_blocks = confirmed
    return where


async def ended(compares: EngineComparison) -> None:
    while compares._running is not None:
        await asyncio.sleep(0)


async def test_a_prompt_that_nobody_tokenized_is_not_compared() -> None:
    compares, _ = comparison(Tokenizes())
    assert compares.begin(Prompt.of_tokens(TOKENS)) is None


async def test_numbers_are_compared_with_the_usage_and_told_to_who_wants_to_know() -> None:
    compares, parity = comparison(Tokenizes())
    told: list[bool] = []
    compared = compares.begin(prompt(judge=told.append))
    assert compared is not None
    for count in (100, 99):
        compares.end(compared, decision(), Usage(count, None))
    compares.end(compared, decision(), None)
    assert told == [True, False]
    assert parity.differences() == {OF: "100 tokens here, 99 in the engine"}


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:-4] + b"\0\0\0\0", None])
async def test_all_tokens_are_compared_with_the_engine_that_ran_the_prompt(tokens: bytes | None) -> None:
    engine = Tokenizes(tokens)
    compares, parity = comparison(engine)
    compared = compares.begin(prompt(wanted=WANTED))
    assert compared is not None
    compares.end(compared, decision(), Usage(100, None))
    await ended(compares)
    assert engine.asked == ["http://x/tokenize"]
    assert parity.differs(OF) == (tokens not in (TOKENS, None))
    await compares.close()


async def test_responses_are_compared_with_what_renders_them_not_with_chat_completions() -> None:
    engine = Tokenizes()
    compares, _ = comparison(engine)
    wanted = TokenRequest({"input": "hi"}, "responses", "m", "a", 1)
    compared = compares.begin(prompt(wanted=wanted, token_class=OF._replace(dialect="responses")))
    assert compared is not None
    compares.end(compared, decision(), Usage(100, None))
    await ended(compares)
    assert engine.asked == ["http://x/v1/responses/render"]


@pytest.mark.parametrize(
    ("cached", "where", "suspect"),
    [
        (64, decision(2), True),
        (48, decision(2), False),  # one block may have come meanwhile
        (0, decision(2), False),
        (None, decision(2), False),
        (64, decision(None), False),  # events say nothing
        (64, decision(2, Role.DECODE), False),  # blocks come from elsewhere
    ],
)
async def test_an_engine_that_has_cached_more_than_its_events_say_makes_a_class_suspect(
    cached: int | None, where: Decision, suspect: bool
) -> None:
    compares, parity = comparison(Tokenizes())
    parity.due(OF)  # the first is compared in any case
    compared = compares.begin(prompt())
    assert compared is not None
    for _ in range(MAX_MISMATCHES):
        compares.end(compared, where, Usage(100, cached))
    assert parity.due(OF) == suspect
