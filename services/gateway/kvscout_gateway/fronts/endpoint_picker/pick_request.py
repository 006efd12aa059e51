"""A request that an endpoint is picked for, read from its headers and body. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvscout_common.http.json_fields import Fields
from kvscout_gateway.fronts.body import model_of, parsed, require_plain
from kvscout_gateway.fronts.client_body import is_form, model_of_form
from kvscout_gateway.fronts.client_paths import HEALTH, MODELS, ClientPaths, model_named
from kvscout_gateway.fronts.reserved import changes_of

MODEL_HEADER: Final = "x-gateway-model-name"
"""Model that Gateway API's body-based routing has read in the body, for pickers that get no body."""
REWRITE_HEADERS: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
"""The model that is to run in place of the one that the body names; the first that is there counts."""


class PickRequest(NamedTuple):
    """A request, before it is placed."""

    model: str
    """"" = it does not say: any worker will do."""
    path: str = ""
    fields: Fields = Fields()
    """Fields of its body."""
    size: int = 0
    """Bytes of the body."""
    subset: tuple[str, ...] | None = None
    """The endpoints that it may go to; None = any."""
    traceparent: str = ""
    """W3C trace context; "" = it has none."""
    changed: bytes | None = None
    """Its body as an engine is to have it; None = as it came."""
    headers: Iterable[tuple[str, str]] = ()
    method: str = ""
    """"" = its proxy does not show it."""
    shows_output: bool = True
    """Its proxy will show the response's body, as far as is known."""


def require_path(headers: Mapping[str, str], paths: ClientPaths) -> None:
    """Refuse a request for a path of engines that is not a client's: its proxy would send it there.

    Args:
        headers: Of the request, by their lower-case names. A proxy may show no path: it is not judged then.
        paths: Those of clients, beside the health and the models that the gateway's other fronts answer themselves.

    Raises:
        PermissionDenied: The path is for operators.
        NotFound: No client has such a path.
    """
    if ":path" not in headers:
        return
    # With a slash at the end engines have no path, or redirect to the one without it.
    path = path_of(headers).removesuffix("/")
    if path not in (HEALTH, MODELS) and not model_named(path):
        paths.require(path, is_admin=None)


async def read_request(
    headers: Mapping[str, str], body: bytes, subset: tuple[str, ...] | None, *, max_priority: int | None = None
) -> PickRequest:
    """Read a request.

    Args:
        headers: By their lower-case names.
        body: Whole; empty if there is none, or none was passed on.
        subset: As the proxy has it.
        max_priority: See `reserved.changes_of`.

    Raises:
        InvalidArgument: The body is neither a JSON object nor a form, its model is no name, or a form has a field
            that is reserved: clients must not set it.
        HttpRefused: It is compressed.
    """
    named, path = headers.get(MODEL_HEADER, ""), path_of(headers)
    asked = PickRequest(
        named,
        path,
        size=len(body),
        subset=subset,
        headers=headers.items(),
        traceparent=headers.get("traceparent", ""),
        method=headers.get(":method", ""),
    )
    if not body:
        return asked
    require_plain(headers.get("content-encoding", ""))
    kind = headers.get("content-type", "")
    if is_form(kind, body):
        of_form = await model_of_form(kind, body)
        return asked._replace(model=named or of_form)
    read = await parsed(body)
    changes = changes_of(read.fields, max_priority=max_priority)
    fields = read.fields.named(named) if named else read.fields
    if rewrite := _first(headers, REWRITE_HEADERS):
        changes["model"] = rewrite
    named_by = Fields().named(rewrite) if rewrite else fields
    changed = read.changed(changes) if changes else body
    return asked._replace(
        model=model_of(named_by) if named_by.get("model") is not None else "",
        fields=fields,
        changed=changed if changed != body else None,
    )


def path_of(headers: Mapping[str, str]) -> str:
    """Return the path of a request, without its query; "" = its proxy shows none."""
    return headers.get(":path", "").partition("?")[0]


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")
