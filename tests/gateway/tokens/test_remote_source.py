"""What servers are asked, for each dialect, and how much time it may take."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import Any, cast

import pytest

from kvscout_common.errors import Unavailable
from kvscout_common.http.json_fields import Fields
from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import NotOnlyText, NotText
from kvscout_gateway.tokens.remote_source import RemoteSource, render_call, tokenize_call
from kvscout_gateway.tokens.remote_tokens import Call, RemoteTokens, Server
from kvscout_gateway.tokens.rendered import Rendered
from kvscout_gateway.tokens.source import SourceName, TokenRequest

HELLO = {"role": "user", "content": "hello"}
ALWAYS = {"model": "m", "mm_payload": "none"}


def wanted(dialect: str, request: dict[str, Any], **more: Any) -> TokenRequest:
    return TokenRequest(request, dialect, "m", "a", 1, remote_seconds=1.0, **more)


def body_of(call: Call) -> Any:
    return json.loads(call.body)


@pytest.mark.parametrize(
    ("dialect", "request_", "path", "body"),
    [
        (
            "chat",
            {"messages": [HELLO], "tools": [1], "temperature": 2, "stream": True, "max_tokens": 99, "model": "adapter"},
            "/v1/chat/completions/render",
            {"max_completion_tokens": 1, "messages": [HELLO], "tools": [1]},
        ),
        (
            "messages",
            {"messages": [HELLO], "system": "s", "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 4}},
            "/v1/messages/render",
            {"max_tokens": 1, "messages": [HELLO], "system": "s"},
        ),
        (
            "messages",
            {"messages": [HELLO], "thinking": {"type": "disabled"}},
            "/v1/messages/render",
            {"max_tokens": 1, "messages": [HELLO], "thinking": {"type": "disabled"}},
        ),
        (
            "responses",
            {"input": "hi", "reasoning": {"effort": "low"}, "store": True, "metadata": {}},
            "/v1/responses/render",
            {"max_output_tokens": 1, "store": False, "input": "hi", "reasoning": {"effort": "low"}},
        ),
    ],
)
def test_a_renderer_is_sent_what_the_prompt_depends_on(
    dialect: str, request_: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    call = render_call(wanted(dialect, request_))
    assert (call.path, body_of(call)) == (path, ALWAYS | body)
    fields = Fields.scanned(json.dumps(request_).encode())
    assert body_of(render_call(TokenRequest(fields, dialect, "m", "a", 1))) == ALWAYS | body


def test_a_completions_first_prompt_is_rendered() -> None:
    call = render_call(wanted("completions", {"prompt": ["x", "y"], "add_special_tokens": False}, text="x"))
    assert body_of(call) == ALWAYS | {"max_tokens": 1, "prompt": "x", "add_special_tokens": False}
    assert body_of(render_call(wanted("completions", {"prompt": "x"}, text="x"))) == ALWAYS | {
        "max_tokens": 1,
        "prompt": "x",
    }


@pytest.mark.parametrize("more", [{"chat_template": "x"}, {"previous_response_id": "resp_1"}])
def test_a_prompt_that_is_not_in_the_request_is_not_asked_for(more: dict[str, Any]) -> None:
    with pytest.raises(NotText):
        render_call(wanted("responses", {"input": "x", **more}))


def test_tokenize_is_asked_the_chat_completion_that_the_engine_makes() -> None:
    request = {"model": "m", "messages": [HELLO], "stream": True, "max_tokens": 4, "reasoning_effort": "low"}
    variables = {"reasoning_effort": "low", "enable_thinking": True}
    expected = {"model": "m", "messages": [HELLO], "add_generation_prompt": True, "chat_template_kwargs": variables}
    call = tokenize_call(wanted("chat", request))
    assert (call.path, body_of(call)) == ("/tokenize", expected)
    call = tokenize_call(wanted("messages", {"model": "m", "messages": [HELLO], "system": "s"}))
    assert body_of(call)["messages"] == [{"role": "system", "content": "s"}, HELLO]
    call = tokenize_call(wanted("completions", {"model": "m", "prompt": "x"}, text="x"))
    assert body_of(call) == {"model": "m", "prompt": "x", "add_special_tokens": True}


def test_what_tokenize_would_tell_wrong_is_not_asked() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(NotOnlyText):
        tokenize_call(wanted("chat", {"messages": [image]}))
    with pytest.raises(NotText):
        tokenize_call(wanted("messages", {"messages": [HELLO], "thinking": {}}, engine=EngineKind.SGLANG))
    with pytest.raises(NotText, match="surrogate"):
        tokenize_call(wanted("completions", {"prompt": "a\ud800"}, text="a\ud800"))


class Timed:
    """Takes its time, by a clock of its own."""

    def __init__(self, takes: float) -> None:
        self.now, self.takes, self.given = 0.0, takes, 0.0
        self.asked: list[Server] = []

    async def ask(self, servers: Iterable[Server], call: Call, *, model: str, tenant: str, seconds: float) -> Rendered:
        self.given, self.asked = seconds, list(servers)
        self.now += self.takes
        return Rendered(array("I", [1]).tobytes())


async def test_the_servers_that_are_asked_for_one_request_share_its_time() -> None:
    remote = Timed(0.7)

    def source(*servers: Server) -> RemoteSource:
        return RemoteSource(
            SourceName.RENDERER,
            cast(RemoteTokens, remote),
            lambda _: servers,
            render_call,
            clock=lambda: remote.now,
        )

    one = wanted("chat", {"messages": [HELLO]})
    assert await source().find(one) is None
    here = source(Server("http://x"), Server("http://y"))
    found = await here.find(one)
    assert found is not None
    assert [server.endpoint for server in remote.asked] == ["http://x", "http://y"]
    assert (found.token_ids, remote.given) == (array("I", [1]).tobytes(), 1.0)
    await here.find(one)
    assert remote.given == pytest.approx(0.3)
    with pytest.raises(Unavailable, match="no time"):
        await here.find(one)
    assert await here.find_beginning(one) is None
