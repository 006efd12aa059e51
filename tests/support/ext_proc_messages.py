"""What a proxy says to an endpoint picker, for tests; built by protobuf alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb

NONE = pb.BODY_MODE_NONE
STREAMED = pb.BODY_MODE_STREAMED
BUFFERED = pb.BODY_MODE_BUFFERED
DUPLEX = pb.BODY_MODE_FULL_DUPLEX_STREAMED
DESTINATION = "x-gateway-destination-endpoint"


def body_of(token_ids: Sequence[int] = (1, 2, 3), **fields: Any) -> bytes:
    """A completion's body."""
    return json.dumps({"model": "mock", "prompt": list(token_ids), **fields}).encode()


def header_map(headers: Mapping[str, str]) -> pb.HeaderMap:
    """Headers as Envoy sends them."""
    return pb.HeaderMap(headers=[pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])


def request_headers(
    request: int | None = BUFFERED,
    response: int = NONE,
    *,
    end: bool = False,
    unwaited: bool = False,
    subset: Any = None,
    headers: Mapping[str, str] = {},
) -> bytes:
    """The first message of a stream.

    Args:
        request: Body mode; None = the proxy does not say how it is configured.
        response: Body mode.
        end: No body follows.
        unwaited: The body comes although the headers were not answered.
        subset: Of endpoints, as JSON has it; None = no hint.
        headers: Beside the usual ones.
    """
    message = pb.ProcessingRequest()
    all_headers = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json", **headers}
    message.request_headers.headers.CopyFrom(header_map(all_headers))
    message.request_headers.end_of_stream = end
    if request is not None:
        message.protocol_config.request_body_mode = request  # type: ignore[assignment]
        message.protocol_config.response_body_mode = response  # type: ignore[assignment]
        message.protocol_config.send_body_without_waiting_for_header_response = unwaited
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": subset}
        )
    return message.SerializeToString()


def request_body(body: bytes, *, end: bool = True) -> bytes:
    """A chunk of a request's body."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end)).SerializeToString()


def request_trailers() -> bytes:
    """A request's trailers."""
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()


def response_headers(
    status: int = 200, *, kind: str = "text/event-stream", end: bool = False, served: str = "", upstream: str = ""
) -> bytes:
    """An engine's headers.

    Args:
        status: HTTP status.
        kind: Content type.
        end: No body follows.
        served: Endpoint, in the protocol's metadata.
        upstream: Endpoint, in Envoy's attributes.
    """
    message = pb.ProcessingRequest()
    message.response_headers.headers.CopyFrom(header_map({":status": str(status), "content-type": kind}))
    message.response_headers.end_of_stream = end
    if served:
        message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    if upstream:
        message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": upstream})
    return message.SerializeToString()


def response_body(body: bytes, *, end: bool = False) -> bytes:
    """A chunk of a response's body."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=end)).SerializeToString()


def response_trailers() -> bytes:
    """A response's trailers."""
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()


def parsed(answers: Sequence[bytes]) -> list[pb.ProcessingResponse]:
    """Answers, read by protobuf."""
    return [pb.ProcessingResponse.FromString(answer) for answer in answers]


def kinds(answers: Sequence[bytes]) -> list[str | None]:
    """What each answer is an answer to."""
    return [answer.WhichOneof("response") for answer in parsed(answers)]


def destinations(answer: pb.ProcessingResponse) -> tuple[str, str]:
    """The picked endpoints, by header and by metadata."""
    message = answer.request_body if answer.HasField("request_body") else answer.request_headers
    mutation = message.response.header_mutation
    assert message.response.clear_route_cache
    [header] = [option.header.raw_value for option in mutation.set_headers if option.header.key == DESTINATION]
    return header.decode(), answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value


def streamed(answers: Sequence[pb.ProcessingResponse], part: str) -> tuple[bytes, list[bool]]:
    """The bytes of a body that goes back in chunks, and which of these say that it ends."""
    chunks = [getattr(answer, part).response.body_mutation.streamed_response for answer in answers]
    assert all(len(chunk.body) <= 64 * 1024 - 1024 for chunk in chunks)
    return b"".join(chunk.body for chunk in chunks), [chunk.end_of_stream for chunk in chunks]
