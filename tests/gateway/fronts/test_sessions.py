"""Which session a request belongs to, by what its client says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.http.json_fields import Fields
from kvscout_gateway.fronts.sessions import MAX_NAME_CHARACTERS, SOURCE_NAMES, Sessions
from kvscout_gateway.values.session import UNKNOWN_SESSION, Session

SAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "claude-code": ({"X-Claude-Code-Session-Id": "s"}, {}),
    "opencode": ({"x-session-affinity": "s"}, {}),
    "session-id": ({"X-Session-Id": "s"}, {}),
    "codex": ({"session_id": "s"}, {}),
    "prompt-cache-key": ({}, {"prompt_cache_key": "s"}),
    "metadata": ({}, {"metadata": {"user_id": "s"}}),
    "user": ({}, {"user": "s"}),
}
"""Headers and body of a request in which a source names a session."""


def session(
    headers: dict[str, str] | None = None,
    body: dict[str, Any] | None = None,
    *,
    tenant: str = "t",
    sessions: Sessions | None = None,
) -> Session:
    return (sessions or Sessions()).of(tenant, (headers or {}).items(), Fields.scanned(json.dumps(body or {}).encode()))


def test_each_source_names_a_session_of_its_own() -> None:
    assert {*SAYS, "previous-response", "lineage"} == set(SOURCE_NAMES)
    found = {session(*said).session_id for said in SAYS.values()}
    assert len(found) == len(SAYS)
    assert 0 not in found


@pytest.mark.parametrize("name", SAYS)
def test_a_source_that_is_switched_off_names_none(name: str) -> None:
    without = Sessions(without=(name,))
    assert session(*SAYS[name], sessions=without) == UNKNOWN_SESSION
    others = [said for other, said in SAYS.items() if other != name]
    assert all(session(*said, sessions=without) == session(*said) for said in others)


def test_lineage_is_switched_off_for_schedulers() -> None:
    assert session().by_lineage
    assert not session(sessions=Sessions(without=("lineage",))).by_lineage
    assert not Sessions(without=("lineage",)).named("t", "").by_lineage


def test_a_request_that_continues_a_response_is_of_the_session_of_that_one() -> None:
    sessions, named = Sessions(), session(*SAYS["user"])
    assert sessions.continued("t", UNKNOWN_SESSION, "resp_1", 5) == Session(5)
    assert sessions.continued("t", named, "resp_1", 5) == named, "what the client says comes first"
    off = Sessions(without=("previous-response",))
    assert off.continued("t", UNKNOWN_SESSION, "resp_1", 5) == UNKNOWN_SESSION


def test_the_name_of_a_response_whose_session_is_unknown_stands_for_it() -> None:
    branches = [Sessions().continued("t", UNKNOWN_SESSION, "resp_1", 0) for _ in range(2)]
    assert branches[0] == branches[1] != UNKNOWN_SESSION
    for tenant, response_id in (("t", "resp_2"), ("other", "resp_1")):
        assert Sessions().continued(tenant, UNKNOWN_SESSION, response_id, 0) != branches[0]


def test_a_conversation_counts_before_a_person() -> None:
    body = {"user": "person", "metadata": {"user_id": "person"}, "prompt_cache_key": "s"}
    assert session({}, body) == session(*SAYS["prompt-cache-key"])
    assert session({"x-claude-code-session-id": "s"}, body) == session(*SAYS["claude-code"])


def test_agents_within_a_session_are_apart() -> None:
    main = session({"x-claude-code-session-id": "s"})
    agents = [session({"x-claude-code-session-id": "s", "x-claude-code-agent-id": one}) for one in "ab"]
    assert len({main, *agents}) == 3


def test_a_subagent_says_whose_it_is() -> None:
    main, named = {"x-claude-code-session-id": "s"}, {"x-claude-code-agent-id": "a"}
    assert session(main).parent_id == session(named).parent_id == 0
    assert session({**main, **named}).parent_id == session(main).session_id
    parent = {"x-parent-session-id": "s"}
    assert session({"x-opencode-session": "sub", **parent}).parent_id == session({"x-opencode-session": "s"}).session_id
    assert session({"x-opencode-session": "s"}).parent_id == 0
    assert session(parent) == UNKNOWN_SESSION, "a parent alone is no session"
    off = Sessions(without=("opencode",))
    assert session({"x-opencode-session": "sub", **parent}, sessions=off) == UNKNOWN_SESSION


def test_a_name_means_nothing_in_another_tenant() -> None:
    assert session(*SAYS["codex"], tenant="a") != session(*SAYS["codex"], tenant="b")
    assert Sessions().named("a", "s") != Sessions().named("b", "s")


def test_a_message_names_the_same_session_as_a_header() -> None:
    assert Sessions().named("t", "s") == session(*SAYS["session-id"])
    assert Sessions().named("t", "") == UNKNOWN_SESSION
    with pytest.raises(InvalidArgument, match="session"):
        Sessions().named("t", "x" * (MAX_NAME_CHARACTERS + 1))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-session-id": ""}, {}),
        ({}, {"user": 5}),
        ({}, {"user": ""}),
        ({}, {"metadata": "s"}),
        ({}, {"metadata": {"user_id": ["s"]}}),
        ({}, {"metadata": {"user_id": "s", "more": "x" * 10_000}}),
        ({}, {"prompt_cache_key": {"a": "s"}}),
    ],
    ids=["empty", "number", "empty-field", "no-object", "list", "long", "object"],
)
def test_what_is_no_name_names_no_session(headers: dict[str, str], body: dict[str, Any]) -> None:
    assert session(headers, body) == UNKNOWN_SESSION


def test_of_a_long_name_as_much_counts_as_there_is_room_for() -> None:
    long = [session({"x-session-id": "x" * MAX_NAME_CHARACTERS + tail}) for tail in "ab"]
    assert long[0] == long[1] != UNKNOWN_SESSION
    assert session({}, {"user": "\ud800"}).session_id, "half a character is a name like any other"


def test_what_is_kept_on_one_worker_is_where_the_flag_says() -> None:
    headers, body = {"X-Mine": "h", "x-session-id": "s"}, {"user": "u"}
    assert session(headers, body).affinity == 0
    by_user, by_header = Sessions(affinity="user"), Sessions(affinity="header:X-Mine")
    assert session(headers, body, sessions=by_user).affinity == session({}, body).session_id
    assert session(headers, body, sessions=by_header).affinity
    assert session({}, body, sessions=by_header).affinity == 0
    off = Sessions(affinity="user", without=("user",))
    assert session({}, body, sessions=off)[::2] == (0, session({}, body).session_id)
    for wrong in ("header:", "session", "USER", "lineage"):
        with pytest.raises(ConfigError, match="session_affinity"):
            Sessions(affinity=wrong)
    with pytest.raises(ConfigError, match="no_session_source"):
        Sessions(without=("codex", "cookies"))
