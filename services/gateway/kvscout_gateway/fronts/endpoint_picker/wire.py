"""The messages of Envoy's external processing, in bytes. Pure.

What comes once a request goes through protobuf. Chunks of bodies come by the hundred, and go back as the bytes that
they came as, wrapped anew: `HttpBody`, which comes, and `StreamedBodyResponse`, which goes, have the same fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb
from kvscout_common.transport.wire_fields import read_varint, varint
from kvscout_gateway.fronts.reserved import RESERVED_HEADERS, is_reserved_header

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
PREFILLER: Final = "x-prefiller-host-port"
"""Address of the prefill worker, for llm-d's sidecar at a decode worker."""
RANK: Final = "x-data-parallel-rank"
NO_HEADERS: Final[Mapping[str, str]] = {}
PICK: Final = "x-kvscout-pick"
"""The name of the pick: what a proxy's access log is to say of the request."""
PROXY_HEADERS: Final = "x-gateway-"
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
UPSTREAM_ADDRESS: Final = "upstream.address"

CHUNK_BYTES: Final = 62_000
"""Longest chunk of a body that is sent back: proxies take 64 KiB a message."""

ANSWER_REQUEST_CHUNK: Final = pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString()
ANSWER_RESPONSE_HEADERS: Final = pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString()
ANSWER_RESPONSE_CHUNK: Final = pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString()
ANSWER_REQUEST_TRAILERS: Final = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
ANSWER_RESPONSE_TRAILERS: Final = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()

_RESPONSE_BODY = 5 << 3 | 2
_BODY = 1 << 3 | 2
_END = b"\x10\x01"
_ANSWER_REQUEST_BODY = 3 << 3 | 2
_ANSWER_RESPONSE_BODY = 4 << 3 | 2
_RESPONSE = 1 << 3 | 2
_BODY_MUTATION = 3 << 3 | 2
_STREAMED_RESPONSE = 3 << 3 | 2


class Chunk(NamedTuple):
    """A chunk of a body, as it stands in its message."""

    fields: bytes
    """Encoded fields of HttpBody, and so of StreamedBodyResponse."""
    body_at: int
    """Offset of the body's bytes in `fields`; its end if there are none."""
    body_bytes: int
    last: bool

    @property
    def body(self) -> bytes:
        """Its bytes."""
        return self.fields[self.body_at : self.body_at + self.body_bytes]


def response_chunk(message: bytes) -> Chunk | None:
    """Return the chunk of a response's body in a message; None if it is about something else, or not written as
    Envoy writes it."""
    if not message or message[0] != _RESPONSE_BODY:
        return None
    try:
        size, at = read_varint(message, 1)
        fields = message[at : at + size]
        return chunk_of(fields) if len(fields) == size else None
    except ValueError:
        return None


def chunk_of(fields: bytes) -> Chunk:
    """Return the chunk of a message's fields.

    Raises:
        ValueError: They are not written as Envoy and protobuf write them.
    """
    if not fields or fields == _END:
        return Chunk(fields, len(fields), 0, bool(fields))
    if fields[0] != _BODY:
        raise ValueError("no chunk of a body")
    body_bytes, body_at = read_varint(fields, 1)
    rest = fields[body_at + body_bytes :]
    if (rest and rest != _END) or body_at + body_bytes > len(fields):
        raise ValueError("no chunk of a body")
    return Chunk(fields, body_at, body_bytes, bool(rest))


def duplex_response_answer(fields: bytes) -> bytes:
    """Send a chunk of a response's body on to the client.

    Args:
        fields: Serialised HttpBody or StreamedBodyResponse.
    """
    return _duplex_answer(_ANSWER_RESPONSE_BODY, fields)


def duplex_request_answers(body: bytes, *, end: bool) -> Iterator[bytes]:
    """Send a request's body on to the engine, in chunks.

    Args:
        body: Whole.
        end: Nothing follows it; else trailers do.
    """
    yield from _duplex_answers(_ANSWER_REQUEST_BODY, body, end=end)


def duplex_response_answers(body: bytes, *, end: bool) -> Iterator[bytes]:
    """Send a long chunk of a response's body on to the client, in shorter ones."""
    yield from _duplex_answers(_ANSWER_RESPONSE_BODY, body, end=end)


def _duplex_answers(tag: int, body: bytes, *, end: bool) -> Iterator[bytes]:
    for start in range(0, max(1, len(body)), CHUNK_BYTES):
        chunk = body[start : start + CHUNK_BYTES]
        last = end and start + CHUNK_BYTES >= len(body)
        yield _duplex_answer(tag, pb.StreamedBodyResponse(body=chunk, end_of_stream=last).SerializeToString())


def _duplex_answer(tag: int, fields: bytes) -> bytes:
    size = len(fields)
    streamed = bytes((_STREAMED_RESPONSE, *varint(size)))
    size += len(streamed)
    mutation = bytes((_BODY_MUTATION, *varint(size)))
    size += len(mutation)
    common = bytes((_RESPONSE, *varint(size)))
    size += len(common)
    return b"".join((bytes((tag, *varint(size))), common, mutation, streamed, fields))


def headers_answer(override: pb.ProcessingMode | None = None) -> bytes:
    """Let a request's headers pass, the pick comes with its body.

    Args:
        override: How the rest is to be passed on; None = as configured.
    """
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(), mode_override=override).SerializeToString()


def pick_answer(
    headers: Mapping[str, str],
    *,
    with_body: bool,
    came: Iterable[str] = (),
    body: bytes | None = None,
    override: pb.ProcessingMode | None = None,
) -> bytes:
    """Tell where a request goes.

    Args:
        headers: To set, `DESTINATION` among them; those of `RESERVED_HEADERS` that are not named are removed.
        with_body: In the answer to its body; else to its headers.
        came: The names of the request's own headers: those that are not a client's to set are removed.
        body: Takes the place of the request's, in the answer to it; None = as it came.
        override: As in `headers_answer`.
    """
    removed = {*RESERVED_HEADERS, *filter(_is_foreign, came)}
    if body is not None:
        # Envoy compares: without it the client gets 500.
        headers = {**headers, "content-length": str(len(body))}
    common = pb.CommonResponse(
        header_mutation=pb.HeaderMutation(
            set_headers=_set(headers), remove_headers=[name for name in sorted(removed) if name not in headers]
        ),
        body_mutation=pb.BodyMutation(body=body) if body is not None else None,
        clear_route_cache=True,
    )
    message = pb.ProcessingResponse(mode_override=override)
    if with_body:
        message.request_body.response.CopyFrom(common)
    else:
        message.request_headers.response.CopyFrom(common)
    message.dynamic_metadata.update({LB_NAMESPACE: {DESTINATION: headers[DESTINATION]}})
    return message.SerializeToString()


def _is_foreign(name: str) -> bool:
    """Tell whether a header is reserved. The proxy's own headers, by which it chooses the route, are not."""
    return is_reserved_header(name) and not name.startswith(PROXY_HEADERS)


def changed_chunk_answers(body: bytes, chunks: int) -> list[bytes]:
    """Answer the chunks of a request's body, in mode STREAMED, with another one: all of it in place of the first."""
    bodies = [pb.BodyMutation(body=body), *(pb.BodyMutation(clear_body=True) for _ in range(chunks - 1))]
    responses = (pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation)) for mutation in bodies[:chunks])
    return [pb.ProcessingResponse(request_body=response).SerializeToString() for response in responses]


def response_headers_answer(headers: Mapping[str, str]) -> bytes:
    """Let a response's headers pass, with further ones set."""
    common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=_set(headers)))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common)).SerializeToString()


def refusal_answer(status: int, body: bytes, *, headers: Mapping[str, str], details: str) -> bytes:
    """Answer the client in the engine's place.

    Args:
        status: HTTP status.
        body: JSON.
        headers: To set beside its content type.
        details: For the proxy's log: one word.
    """
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status),
            headers=pb.HeaderMutation(set_headers=_set({"content-type": "application/json", **headers})),
            body=body,
            details=details,
        )
    ).SerializeToString()


def _set(headers: Mapping[str, str]) -> list[pb.HeaderValueOption]:
    return [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode()),
            append_action=pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers.items()
    ]


def header_map(headers: pb.HeaderMap) -> dict[str, str]:
    """Return headers by lower-case name; of several with one name, the last."""
    return {
        header.key.lower(): header.raw_value.decode("latin-1") if header.raw_value else header.value
        for header in headers.headers
    }


def subset_hint(request: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """Return the endpoints that the proxy allows; None = it says nothing, () = none."""
    namespace = request.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
    if namespace is None or SUBSET not in namespace.fields:
        return None
    value = namespace.fields[SUBSET]
    if value.HasField("list_value"):
        named = [item.string_value for item in value.list_value.values]
    else:
        return endpoints_in(value.string_value)
    return tuple(endpoint.strip() for endpoint in named if endpoint.strip())


def endpoints_in(text: str) -> tuple[str, ...]:
    """Return the endpoints in a list with commas."""
    return tuple(endpoint.strip() for endpoint in text.split(",") if endpoint.strip())


def served_by_metadata(request: pb.ProcessingRequest) -> str:
    """Return the endpoint that answers, by the protocol's metadata; "" = the proxy does not report it."""
    namespace = request.metadata_context.filter_metadata.get(LB_NAMESPACE)
    return namespace.fields[SERVED].string_value if namespace is not None and SERVED in namespace.fields else ""


def served_endpoint(request: pb.ProcessingRequest) -> str:
    """Return the endpoint that answers, by the protocol's metadata or Envoy's attribute; "" = not reported."""
    if served := served_by_metadata(request):
        return served
    for attributes in request.attributes.values():
        if UPSTREAM_ADDRESS in attributes.fields:
            return attributes.fields[UPSTREAM_ADDRESS].string_value
    return ""
