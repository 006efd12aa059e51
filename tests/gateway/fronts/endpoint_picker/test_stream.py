"""One request past the picker, message by message: no proxy, no socket."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.ext_proc_messages import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    body_of,
    destinations,
    kinds,
    parsed,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
    streamed,
)
from support.seeds import test_seed

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb
from kvscout_common.errors import InvalidArgument
from kvscout_gateway.fronts.endpoint_picker import conformance, wire
from kvscout_gateway.fronts.endpoint_picker.stream import (
    Answering,
    BodyTooLong,
    Close,
    Ended,
    FirstOutput,
    Follow,
    PickWanted,
    RequestStream,
    Step,
)
from kvscout_gateway.fronts.reserved import RESERVED_HEADERS

PICK = {wire.DESTINATION: "10.0.0.1:8000,10.0.0.2:8000"}


def stream(follow: Follow = Follow.PROXY, max_body_bytes: int = 1 << 20) -> RequestStream:
    return RequestStream(follow, max_body_bytes=max_body_bytes)


def wanted(step: Step) -> PickWanted:
    [event] = step.events
    assert isinstance(event, PickWanted)
    return event


def until_picked(
    request: int, response: int, *, follow: Follow = Follow.PROXY, path: str = "/v1/chat/completions"
) -> RequestStream:
    one = stream(follow)
    one.receive(request_headers(request, response, headers={":path": path}))
    one.receive(request_body(body_of()))
    one.picked(PICK)
    return one


def test_headers_of_a_pick_are_set_in_the_response_that_the_proxy_shows() -> None:
    one = stream()
    one.receive(request_headers(BUFFERED))
    one.receive(request_body(body_of()))
    one.picked(PICK, answer_headers={"x-kvscout-worker": "w1"})
    [answer] = parsed(one.receive(response_headers()).answers)
    [header] = answer.response_headers.response.header_mutation.set_headers
    assert (header.header.key, header.header.raw_value) == ("x-kvscout-worker", b"w1")


def test_buffered_headers_pass_at_once_and_the_pick_is_in_the_answer_to_the_body() -> None:
    one = stream()
    step = one.receive(request_headers(BUFFERED))
    assert kinds(step.answers) == ["request_headers"]
    assert not step.events
    step = one.receive(request_body(body_of()))
    assert not step.answers
    assert wanted(step).body == body_of()
    assert wanted(step).headers[":path"] == "/v1/completions"
    [answer] = parsed(one.picked(PICK).answers)
    assert answer.WhichOneof("response") == "request_body"
    assert destinations(answer) == (PICK[wire.DESTINATION],) * 2


def test_what_a_client_says_about_destinations_is_removed_unless_the_pick_says_it() -> None:
    one = stream()
    one.receive(request_headers(BUFFERED))
    one.receive(request_body(body_of()))
    [answer] = parsed(one.picked({**PICK, wire.RANK: "1"}).answers)
    mutation = answer.request_body.response.header_mutation
    assert set(mutation.remove_headers) == RESERVED_HEADERS - {wire.DESTINATION, wire.RANK}
    assert {wire.DESTINATION, wire.PREFILLER, wire.RANK, wire.PICK} <= RESERVED_HEADERS
    for option in mutation.set_headers:
        assert option.append_action == pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
        assert option.header.raw_value
        assert not option.header.value


@pytest.mark.parametrize("length", [0, 1, 62_000, 62_001, 200_000])
def test_in_full_duplex_headers_and_body_go_back_in_pieces_once_the_body_is_whole(length: int) -> None:
    seed = test_seed()
    draw = random.Random(seed)
    body = draw.randbytes(length)
    one = stream()
    assert one.receive(request_headers(DUPLEX, DUPLEX)) == Step()
    cuts = sorted(draw.randrange(length + 1) for _ in range(3))
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    for chunk in chunks[:-1]:
        assert one.receive(request_body(chunk, end=False)) == Step()
    assert one.held_bytes == sum(map(len, chunks[:-1]))
    assert wanted(one.receive(request_body(chunks[-1]))).body == body
    headers, *rest = parsed(one.picked(PICK).answers)
    assert destinations(headers) == (PICK[wire.DESTINATION],) * 2
    sent, ends = streamed(rest, "request_body")
    assert sent == body
    assert ends == [False] * (len(rest) - 1) + [True]
    assert one.held_bytes == 0


def test_trailers_end_a_body_and_go_back_behind_it() -> None:
    one = stream()
    one.receive(request_headers(DUPLEX, DUPLEX))
    one.receive(request_body(b"{}", end=False))
    assert wanted(one.receive(request_trailers())).body == b"{}"
    answers = one.picked(PICK).answers
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert streamed(parsed(answers)[1:2], "request_body") == (b"{}", [False])


def test_a_body_that_comes_without_waiting_is_gathered_and_each_piece_answered_behind_the_pick() -> None:
    one = stream()
    assert one.receive(request_headers(STREAMED, NONE, unwaited=True)) == Step()
    assert one.receive(request_body(b'{"model":', end=False)) == Step()
    assert wanted(one.receive(request_body(b'"m"}'))).body == b'{"model":"m"}'
    answers = one.picked(PICK).answers
    assert kinds(answers) == ["request_headers", "request_body", "request_body"]
    assert not parsed(answers)[1].request_body.HasField("response")


@pytest.mark.parametrize(("mode", "end"), [(NONE, False), (STREAMED, False), (BUFFERED, True), (DUPLEX, True)])
def test_without_a_body_to_wait_for_the_headers_are_picked_by(mode: int, end: bool) -> None:
    one = stream()
    step = one.receive(request_headers(mode, NONE, end=end))
    assert not step.answers
    assert wanted(step).body == b""
    answers = one.picked(PICK).answers
    assert kinds(answers) == ["request_headers"]
    assert destinations(parsed(answers)[0]) == (PICK[wire.DESTINATION],) * 2
    if mode == STREAMED:
        assert kinds(one.receive(request_body(b"x", end=False)).answers) == ["request_body"]
        assert kinds(one.receive(request_trailers()).answers) == ["request_trailers"]


def test_a_proxy_that_tells_no_modes_gets_the_pick_when_the_body_is_whole_and_shows_nothing_more() -> None:
    one = stream()
    assert one.receive(request_headers(None)) == Step()
    wanted(one.receive(request_body(body_of())))
    assert kinds(one.picked(PICK).answers) == ["request_headers", "request_body"]
    assert one.closed() is Close.LEFT


@pytest.mark.parametrize(("hint", "subset"), [
    (["10.0.0.1:8000", "10.0.0.2:8000"], ("10.0.0.1:8000", "10.0.0.2:8000")),
    ("10.0.0.1:8000, 10.0.0.2:8000", ("10.0.0.1:8000", "10.0.0.2:8000")),
    ([], ()),
    ("", ()),
    (None, None),
])  # fmt: skip
def test_a_subset_comes_as_a_list_or_with_commas(hint: object, subset: tuple[str, ...] | None) -> None:
    one = stream()
    assert wanted(one.receive(request_headers(NONE, subset=hint))).subset == subset


@pytest.mark.parametrize("told", ["served", "upstream"])
def test_the_endpoint_that_served_is_read_back(told: str) -> None:
    one = until_picked(BUFFERED, NONE)
    step = one.receive(response_headers(**{told: "10.0.0.2:8000"}))  # type: ignore[arg-type]
    assert kinds(step.answers) == ["response_headers"]
    assert step.events == (Answering(200, "10.0.0.2:8000", in_chunks=True),)


def test_in_full_duplex_each_piece_of_a_response_goes_back_at_once_as_it_came() -> None:
    one = until_picked(DUPLEX, DUPLEX)
    one.receive(response_headers())
    seed = test_seed()
    draw = random.Random(seed)
    for number, length in enumerate([1, 126, 127, 128, 129, 16_383, 16_384, 62_000, 62_001, 180_000]):
        body = draw.randbytes(length)
        step = one.receive(response_body(body))
        sent, ends = streamed(parsed(step.answers), "response_body")
        assert sent == body
        assert not any(ends)
        assert step.events == ((FirstOutput(body),) if number == 0 else ())
    step = one.receive(response_body(b"", end=True))
    assert streamed(parsed(step.answers), "response_body") == (b"", [True])
    assert isinstance(step.events[0], Ended)


def test_streamed_pieces_are_answered_with_nothing() -> None:
    one = until_picked(BUFFERED, STREAMED)
    one.receive(response_headers())
    assert one.receive(response_body(b"data: 1\n\n")).events == (FirstOutput(b"data: 1\n\n"),)
    step = one.receive(response_body(b"data: 2\n\n"))
    assert not step.events
    [answer] = parsed(step.answers)
    assert answer == pb.ProcessingResponse(response_body=pb.BodyResponse())


def test_the_end_brings_the_last_bytes_of_the_response() -> None:
    one = until_picked(BUFFERED, STREAMED)
    one.receive(response_headers())
    for number in range(10):
        one.receive(response_body(b"data: %d\n\n" % number))
    [ended] = one.receive(response_body(b"", end=True)).events
    assert isinstance(ended, Ended)
    assert ended.tail.endswith(b"data: 8\n\ndata: 9\n\n")
    assert one.closed() is Close.IDLE


def test_a_response_in_one_piece_is_first_output_and_end() -> None:
    one = until_picked(BUFFERED, BUFFERED)
    one.receive(response_headers())
    step = one.receive(response_body(b"{}", end=True))
    assert step.events == (FirstOutput(b"{}"), Ended(b"{}"))
    assert kinds(step.answers) == ["response_body"]


def test_the_first_event_of_a_response_that_begins_before_its_prompt_is_computed_is_no_output() -> None:
    one = until_picked(BUFFERED, STREAMED, path="/v1/responses")
    one.receive(response_headers())
    created = b'event: response.created\ndata: {"response":{"id":"resp_1","instructions":"a.delta"}}\n\n'
    assert one.receive(response_body(created)).events == ()
    [first] = one.receive(response_body(b"event: response.output_text.delta\ndata: {}\n\n")).events
    assert first == FirstOutput(created)
    assert one.receive(response_body(b"event: response.output_text.delta\ndata: {}\n\n")).events == ()


def test_a_whole_response_is_output() -> None:
    one = until_picked(BUFFERED, BUFFERED, path="/v1/responses")
    one.receive(response_headers(kind="application/json"))
    assert one.receive(response_body(b"{}", end=True)).events == (FirstOutput(b"{}"), Ended(b"{}"))


def test_trailers_end_a_response() -> None:
    one = until_picked(BUFFERED, NONE)
    one.receive(response_headers())
    step = one.receive(response_trailers())
    assert kinds(step.answers) == ["response_trailers"]
    assert step.events == (Ended(b""),)


def test_an_error_has_no_output() -> None:
    one = until_picked(BUFFERED, STREAMED)
    assert one.receive(response_headers(503)).events == (Answering(503, "", in_chunks=True),)
    assert one.receive(response_body(b"{}", end=True)).events == (Ended(b"{}"),)


def test_headers_alone_can_be_a_response() -> None:
    one = until_picked(BUFFERED, STREAMED)
    assert one.receive(response_headers(204, end=True)).events == (Answering(204, "", in_chunks=True), Ended(b""))


@pytest.mark.parametrize(("request_mode", "response_mode", "asked"), [
    (BUFFERED, NONE, True), (NONE, NONE, True), (BUFFERED, STREAMED, False), (DUPLEX, NONE, True),
])  # fmt: skip
def test_a_proxy_that_passes_no_bodies_on_is_asked_to_where_one_is_to_be_seen(
    request_mode: int, response_mode: int, asked: bool
) -> None:
    one = stream(Follow.MESSAGES)
    step = one.receive(request_headers(request_mode, response_mode))
    if request_mode == DUPLEX:
        one.receive(request_body(body_of()))
    answer = parsed(step.answers or one.picked(PICK).answers)[0]
    assert answer.HasField("mode_override") == asked
    if asked:
        assert answer.mode_override.request_body_mode == request_mode
        assert answer.mode_override.response_body_mode == STREAMED


def test_pieces_that_were_asked_for_are_answered_and_their_lack_of_an_end_seen() -> None:
    one = until_picked(BUFFERED, NONE, follow=Follow.MESSAGES)
    one.receive(response_headers())
    step = one.receive(response_body(b"data: 1\n\n"))
    assert kinds(step.answers) == ["response_body"]
    assert step.events == (FirstOutput(b"data: 1\n\n"),)
    assert one.closed() is Close.ABORTED


def test_leaving_is_after_the_pick() -> None:
    one = stream(Follow.LEAVE)
    assert not one.receive(request_headers(BUFFERED)).close
    assert not one.receive(request_body(body_of())).close
    assert one.picked(PICK).close


@pytest.mark.parametrize(("response", "ends_with_answers", "leaves"), [
    (DUPLEX, True, True), (DUPLEX, False, False), (STREAMED, False, True), (NONE, False, True),
])  # fmt: skip
def test_what_the_proxy_would_lose_by_the_end_of_the_stream_is_not_left(
    response: int, ends_with_answers: bool, leaves: bool
) -> None:
    one = RequestStream(Follow.LEAVE, max_body_bytes=1 << 20, ends_with_answers=ends_with_answers)
    one.receive(request_headers(BUFFERED, response))
    one.receive(request_body(body_of()))
    assert one.picked(PICK).close is leaves


@pytest.mark.parametrize(("response_mode", "what"), [
    (NONE, Close.OVER), (STREAMED, Close.ABORTED), (DUPLEX, Close.ABORTED), (BUFFERED, Close.ABORTED),
])  # fmt: skip
def test_what_the_end_of_a_stream_means_depends_on_what_the_proxy_shows(response_mode: int, what: Close) -> None:
    one = until_picked(BUFFERED, response_mode)
    one.receive(response_headers())
    assert one.closed() is what
    assert one.closed() is Close.IDLE


def test_a_stream_that_ends_before_an_answer_is_aborted_and_before_a_pick_nothing() -> None:
    assert until_picked(BUFFERED, NONE).closed() is Close.ABORTED
    assert stream().closed() is Close.IDLE
    one = stream()
    one.receive(request_headers(BUFFERED))
    one.receive(request_body(body_of()))
    assert one.closed() is Close.IDLE


def test_a_refusal_ends_the_stream() -> None:
    one = stream()
    one.receive(request_headers(BUFFERED))
    one.receive(request_body(body_of()))
    answer = wire.refusal_answer(429, b"{}", headers={"retry-after": "1"}, details="kvscout_busy")
    step = one.refused(answer)
    assert step.close
    immediate = parsed(step.answers)[0].immediate_response
    assert immediate.status.code == 429
    assert immediate.body == b"{}"
    assert {option.header.key: option.header.raw_value for option in immediate.headers.set_headers} == {
        "content-type": b"application/json",
        "retry-after": b"1",
    }
    assert one.closed() is Close.IDLE


def test_a_body_beyond_the_bound_is_told_of_and_not_kept() -> None:
    one = stream(max_body_bytes=10)
    one.receive(request_headers(DUPLEX))
    one.receive(request_body(b"12345678", end=False))
    assert one.receive(request_body(b"901", end=False)).events == (BodyTooLong(),)
    one.refused(b"")
    assert one.held_bytes == 0


def test_a_filter_that_only_shows_is_left() -> None:
    message = pb.ProcessingRequest.FromString(request_headers(STREAMED))
    message.observability_mode = True
    assert stream().receive(message.SerializeToString()) == Step(close=True)


@pytest.mark.parametrize("message", [b"\xff", b"", response_headers(), response_body(b""), request_body(b"")])
def test_what_is_no_message_or_comes_at_the_wrong_time_is_an_error(message: bytes) -> None:
    with pytest.raises(InvalidArgument):
        stream().receive(message)


def test_pieces_that_another_writer_wrote_are_understood() -> None:
    one = until_picked(DUPLEX, DUPLEX)
    one.receive(response_headers())
    metadata_first = pb.ProcessingRequest()
    metadata_first.metadata_context.filter_metadata["envoy.lb"].update({"a": "b"})
    chunk = response_body(b"data: 1\n\n")
    for message in (
        metadata_first.SerializeToString() + chunk,
        chunk + metadata_first.SerializeToString(),
        b"\x2a\x0d\x10\x00\x0a\x09data: 1\n\n",  # the flag before the bytes, and written although unset
    ):
        assert streamed(parsed(one.receive(message).answers), "response_body") == (b"data: 1\n\n", [False])


def test_hostile_pieces_are_errors_and_never_more() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    for _ in range(2_000):
        one = until_picked(BUFFERED, draw.choice([STREAMED, DUPLEX]))
        one.receive(response_headers())
        message = bytearray(response_body(draw.randbytes(draw.randrange(200)), end=draw.random() < 0.5))
        for _ in range(draw.randrange(1, 4)):
            message[draw.randrange(len(message))] = draw.randrange(256)
        try:
            for answer in parsed(one.receive(bytes(message)).answers):
                assert answer.WhichOneof("response")
        except InvalidArgument:
            pass


def test_only_in_conformance_tests_a_response_says_where_it_comes_from() -> None:
    def answered(one: RequestStream, **told: Any) -> dict[str, str]:
        one.receive(request_headers(NONE))
        one.picked(PICK)
        [answer] = parsed(one.receive(response_headers(**told)).answers)
        mutation = answer.response_headers.response.header_mutation
        return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}

    def tested() -> RequestStream:
        return RequestStream(Follow.PROXY, max_body_bytes=1, report=conformance.report)

    assert answered(stream(), served="10.0.0.2:8000") == {}
    picked = {conformance.SELECTED: "10.0.0.1:8000"}
    assert answered(tested(), served="10.0.0.2:8000") == {conformance.SERVED: "10.0.0.2:8000", **picked}
    # Only what the protocol says counts there, not what Envoy knows beside it.
    assert answered(tested(), upstream="10.0.0.2:8000") == {conformance.SERVED: conformance.UNTOLD, **picked}


@pytest.mark.parametrize("chunks", [1, 3])
def test_another_body_takes_the_place_of_a_request_s_in_every_mode_that_shows_it(chunks: int) -> None:
    body, other = body_of(range(90_000)), body_of(range(80_000), model="other")

    def answers(mode: int, *, unwaited: bool = False) -> list[pb.ProcessingResponse]:
        one = stream()
        one.receive(request_headers(mode, unwaited=unwaited))
        size = -(-len(body) // chunks) if mode != BUFFERED else len(body)
        for start in range(0, len(body), size):
            one.receive(request_body(body[start : start + size], end=start + size >= len(body)))
        return parsed(one.picked(PICK, other).answers)

    [buffered] = answers(BUFFERED)
    assert buffered.request_body.response.body_mutation.body == other
    assert destinations(buffered)[0] == PICK[wire.DESTINATION]
    headers, *parts = answers(STREAMED, unwaited=True)
    assert destinations(headers)[0] == PICK[wire.DESTINATION]
    mutations = [part.request_body.response.body_mutation for part in parts]
    assert [(mutation.body, mutation.clear_body) for mutation in mutations] == [(other, False)] + [(b"", True)] * (
        chunks - 1
    )
    headers, *parts = answers(DUPLEX)
    whole, ends = streamed(parts, "request_body")
    assert (whole, ends[-1], any(ends[:-1])) == (other, True, False)


def test_headers_that_say_where_a_request_goes_are_removed_but_those_of_the_proxy() -> None:
    one = stream()
    came = ("x-data-parallel-host", "x-smg-target", "x-kv-cache-source-host-port", "x-gateway-model-name", "accept")
    one.receive(request_headers(NONE, headers=dict.fromkeys(came, "1")))
    [answer] = parsed(one.picked(PICK).answers)
    removed = set(answer.request_headers.response.header_mutation.remove_headers)
    assert removed >= {"x-data-parallel-host", "x-smg-target", "x-kv-cache-source-host-port", wire.PREFILLER}
    assert not removed & {"x-gateway-model-name", "accept", wire.DESTINATION}


@pytest.mark.parametrize(
    ("follow", "configured", "response", "shows"),
    [
        (Follow.PROXY, True, STREAMED, True),
        (Follow.PROXY, True, DUPLEX, True),
        (Follow.PROXY, True, NONE, False),
        (Follow.MESSAGES, True, NONE, True),
        (Follow.LEAVE, True, STREAMED, False),
        (Follow.PROXY, False, NONE, False),
    ],
)
def test_whether_output_will_be_seen_is_known_when_a_pick_is_wanted(
    follow: Follow, configured: bool, response: int, shows: bool
) -> None:
    one = RequestStream(follow, max_body_bytes=1 << 20)
    step = one.receive(request_headers(NONE if configured else None, response, end=True))
    (wanted,) = step.events
    assert isinstance(wanted, PickWanted)
    assert wanted.shows_output is shows
