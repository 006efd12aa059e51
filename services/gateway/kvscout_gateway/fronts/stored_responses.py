"""Workers on which responses are stored: a request that names a response runs where that is, or nowhere.

An engine keeps what it stores for itself. Which worker has a response is known from the worker's own answer: the one
that it gave when it made the response, through this gateway, or the one to the question whether it has it. So that
several gateways need to share nothing, and a restart loses nothing. Beside the worker stands the session of the request
that made the response, so that a request which continues it is of the same session.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscout_common.errors import KvscoutError, NotFound, ResourceExhausted, Unavailable
from kvscout_common.http.http import Headers, HttpFailed, HttpRequest
from kvscout_common.http.json_fields import Fields
from kvscout_common.worker import Role, WorkerSpec
from kvscout_gateway.values.dialects import COUNT_PATHS, RESPONSES

if TYPE_CHECKING:
    from kvscout_gateway.engines.engine_call import Engines
    from kvscout_gateway.fronts.sessions import Sessions
    from kvscout_gateway.members.catalog import Catalog
    from kvscout_gateway.values.request import Request

MAX_RESPONSES: Final = 32_768
"""Responses that are remembered; beyond it those that nobody has named for longest are forgotten, and asked for."""
KEPT_SECONDS: Final = 3600.0
"""Seconds for which a response is remembered since it was last named."""
ASK_SECONDS: Final = 2.0
"""Longest wait for a worker that is asked."""
MAX_ASKED: Final = 64
"""Workers asked at once for one response."""
MAX_SEARCHES: Final = 8
"""Responses that are searched at once: any client can name one that nobody has."""
PREVIOUS: Final = "previous_response_id"
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,256}")
_PATH: Final = re.compile(rf"{RESPONSES.path}/({_ID.pattern})(/cancel|/input_items)?")


_NAME: Final = re.compile(rb'"id" ?: ?"(resp_[A-Za-z0-9_-]{1,251})"')


class ResponseNotFound(NotFound):
    """No worker has the response."""


class ResponseRef(NamedTuple):
    """A response that a request names."""

    tenant: str
    response_id: str
    model: str = ""
    """"" = the request does not say."""
    field: str | None = None
    """Field of the body that names it; None = the path does."""


def named_by(tenant: str, method: str, path: str) -> ResponseRef | None:
    """Return the response that a path below `RESPONSES` means; None = it means none.

    Args:
        tenant: Whose request it is.
        method: Of the request.
        path: Of its URL.
    """
    found = _PATH.fullmatch(path)
    if found is None or path in COUNT_PATHS or (method == "POST" and found[2] != "/cancel"):
        return None
    return ResponseRef(tenant, found[1])


def name_in(head: bytes) -> str:
    """Return the name of a response in the first bytes of an answer, where engines write it first; "" = none."""
    found = _NAME.search(head)
    return found[1].decode() if found is not None else ""


class _Stored(NamedTuple):
    """What is remembered of a response."""

    worker_id: str
    until: float
    """By the clock."""
    session_id: int
    """0 = unknown."""


_UNKNOWN: Final = _Stored("", 0.0, 0)


class StoredResponses:
    """Finds the worker and the session of a response."""

    def __init__(
        self,
        catalog: Catalog,
        engines: Engines,
        sessions: Sessions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know of none.

        Args:
            catalog: The registered workers.
            engines: Asks them.
            sessions: Knows whether a response names its session.
            clock: Seconds.
        """
        self._catalog = catalog
        self._engines = engines
        self._sessions = sessions
        self._clock = clock
        self._stored: OrderedDict[tuple[str, str], _Stored] = OrderedDict()
        """By tenant and response; the last one named is last."""
        self._searches: dict[tuple[str, str], asyncio.Task[WorkerSpec]] = {}
        """That run, by tenant and response."""

    def __len__(self) -> int:
        return len(self._stored)

    def learn(self, tenant: str, response_id: str, worker_id: str, session_id: int = 0) -> None:
        """Remember where a response is, and whose turn made it.

        Args:
            tenant: Whose it is.
            response_id: As the engine names it; "" = it has no name.
            worker_id: The worker that says that it has it.
            session_id: Session of the request that made it; 0 = unknown.
        """
        if not _ID.fullmatch(response_id):
            return
        key = tenant, response_id
        self._stored[key] = _Stored(worker_id, self._clock() + KEPT_SECONDS, session_id)
        self._stored.move_to_end(key)
        if len(self._stored) > MAX_RESPONSES:
            self._stored.popitem(last=False)

    async def pinned(self, request: Request, fields: Fields, headers: Headers = ()) -> Request:
        """Return a request for output that runs where the response is that it continues, if it continues one, as a turn
        of the same session.

        Args:
            request: The request.
            fields: Of its body.
            headers: See `worker_of`.

        Raises:
            KvscoutError: As `worker_of`.
        """
        response_id = fields.get(PREVIOUS) if request.api.stores else None
        if not isinstance(response_id, str) or not _ID.fullmatch(response_id):
            return request  # what is no name is the engine's to refuse
        spec = await self.worker_of(ResponseRef(request.tenant, response_id, request.model, PREVIOUS), headers)
        reason = f"only worker {spec.worker_id!r} has the previous response"
        known = self._stored.get((request.tenant, response_id), _UNKNOWN).session_id
        session = self._sessions.continued(request.tenant, request.session, response_id, known)
        return replace(request, pinned=spec.worker_id, undivided=reason, session=session)

    async def worker_of(self, named: ResponseRef, headers: Headers = ()) -> WorkerSpec:
        """Return the worker that has a response; workers are asked where it is not known here.

        Args:
            named: The response.
            headers: That workers want to see, such as their key.

        Raises:
            ResponseNotFound: No worker has it.
            Unavailable: A worker that may have it does not answer.
            ResourceExhausted: Too many responses are searched for.
        """
        known = self._known(named)
        if known is not None:
            return known
        specs = [spec for spec in self._specs(named) if spec.http_endpoint and spec.role is not Role.PREFILL]
        if len(specs) == 1:
            return specs[0]  # it says itself that it has none
        key = named.tenant, named.response_id
        search = self._searches.get(key)
        if search is None:
            if len(self._searches) >= MAX_SEARCHES:
                raise ResourceExhausted("too many responses are searched for", retry_after_seconds=1.0)
            search = self._searches[key] = asyncio.create_task(self._search(named, specs, headers))
            search.add_done_callback(lambda ended: self._ended(key, ended))
        # Branches of a conversation come at once, and wait for the same answer; one that leaves ends it for nobody.
        return await asyncio.shield(search)

    def _ended(self, key: tuple[str, str], search: asyncio.Task[WorkerSpec]) -> None:
        del self._searches[key]
        if not search.cancelled():
            search.exception()  # seen, also where nobody waits any more

    def _known(self, named: ResponseRef) -> WorkerSpec | None:
        key = named.tenant, named.response_id
        stored = self._stored.get(key, _UNKNOWN)
        spec = self._catalog.tenant(named.tenant).specs.get(stored.worker_id)
        if spec is None or self._clock() >= stored.until:
            self._stored.pop(key, None)
            return None
        self.learn(*key, stored.worker_id, stored.session_id)
        return spec

    def _specs(self, named: ResponseRef) -> Iterable[WorkerSpec]:
        view = self._catalog.tenant(named.tenant)
        return view.serving(named.model).specs if named.model else view.specs.values()

    async def _search(self, named: ResponseRef, specs: Sequence[WorkerSpec], headers: Headers) -> WorkerSpec:
        silent = 0
        for begin in range(0, len(specs), MAX_ASKED):
            asked = specs[begin : begin + MAX_ASKED]
            for spec, has_it in zip(asked, await self._ask(named.response_id, asked, headers), strict=True):
                if has_it:
                    self.learn(named.tenant, named.response_id, spec.worker_id)
                    return spec
                silent += has_it is None
        raise _missing(named, silent)

    async def _ask(self, response_id: str, specs: Sequence[WorkerSpec], headers: Headers) -> list[bool | None]:
        """Return whether each worker has a response; None = it does not say."""
        return await asyncio.gather(*(self._has(response_id, spec, headers) for spec in specs))

    async def _has(self, response_id: str, spec: WorkerSpec, headers: Headers) -> bool | None:
        url = f"{spec.http_endpoint}{RESPONSES.path}/{response_id}"
        request = HttpRequest(url, method="GET", headers=(*headers, *self._engines.own_headers()))
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await self._engines.client.send(
                    request, connect_seconds=self._engines.timeouts.connect_seconds
                )
        except (HttpFailed, TimeoutError):
            return None
        answer.abort()
        return None if answer.status >= 500 else answer.status == 200


def _missing(named: ResponseRef, silent: int) -> KvscoutError:
    what = f"the response {named.response_id!r}"
    if silent:
        who = "a worker" if silent == 1 else f"{silent} workers"
        return Unavailable(f"{what} may be on {who} that cannot be reached now", retry_after_seconds=1.0)
    return ResponseNotFound(
        f"no worker has {what}: it was never stored, or its worker is gone; send the conversation itself as input",
        field=named.field,
    )
