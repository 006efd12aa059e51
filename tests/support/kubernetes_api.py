"""A Kubernetes API server for tests: list, watch, pages, bookmarks, 410, and whatever else goes wrong with one.

As unkind as the real one: a watch ends when its time is up, versions are texts, an object that leaves a selector is
DELETED to its watchers, and a server that was killed has forgotten what it would need to go on with old watches if
`expire` was called. Kinder than it: it authenticates one token, and knows equality in label selectors only.
"""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.free_ports import free_ports
from support.web_servers import end_web_server

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/default/inferenceobjectives"
OLD_OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/default/inferenceobjectives"
PODS = "/api/v1/namespaces/default/pods"

Object = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def pod(name: str, ip: str, *, uid: str = "", ready: bool = True, **besides: Any) -> Object:
    """A pod as the API shows it.

    Args:
        name: Its name, and of its labels' `app`, if they are not given.
        ip: Its address.
        uid: "" = made from its name.
        ready: Its condition.
        besides: labels, annotations, ports (name → number), phase, restarts, deleting, sidecar_ports.
    """
    meta: Object = {
        "name": name,
        "namespace": "default",
        "uid": uid or f"uid-{name}",
        "labels": besides.get("labels", {"app": "vllm"}),
        "annotations": besides.get("annotations", {}),
    }
    if besides.get("deleting"):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def container(ports: dict[str, int]) -> Object:
        return {"name": "c", "ports": [{"name": n, "containerPort": p} for n, p in ports.items()]}

    spec = {"containers": [container(besides.get("ports", {}))]}
    if "sidecar_ports" in besides:
        spec["initContainers"] = [container(besides["sidecar_ports"]) | {"restartPolicy": "Always"}]
    return {
        "metadata": meta,
        "spec": spec,
        "status": {
            "phase": besides.get("phase", "Running"),
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"restartCount": besides.get("restarts", 0)}],
        },
    }


def pool(name: str, labels: dict[str, str], *ports: int) -> Object:
    """An InferencePool as the API shows it."""
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]},
    }


def objective(name: str, pool_name: str, priority: Any = None) -> Object:
    """An InferenceObjective as the API shows it."""
    spec: Object = {"poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool_name}}
    if priority is not None:
        spec["priority"] = priority
    return {"metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"}, "spec": spec}


class FakeApi:
    """One server; `url` stays the same over `kill` and `start`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        [self.port] = free_ports(1)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.token = ""
        """Who shows another one is told 401."""
        self.page = 0
        """Most objects of a page; 0 = as many as are asked for."""
        self.override: Handler | None = None
        """Answers instead."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        """Paths and parameters, in order."""
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None
        self._version = 100
        self._oldest = 100
        self._objects: dict[str, dict[str, Object]] = {PODS: {}, POOLS: {}}
        self._log: list[tuple[int, str, Object | None, Object | None]] = []
        """Version, path, object before, object after."""
        self._news = asyncio.Condition()

    @property
    def watches(self) -> int:
        """Watches that were asked for."""
        return sum("watch" in query for _, query in self.asked)

    @property
    def lists(self) -> int:
        """Lists, or pages of them, that were asked for."""
        return len(self.asked) - self.watches

    async def start(self) -> None:
        """Serves, again."""
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", self.port))
        await web.SockSite(self._runner, self._listening, ssl_context=self._tls).start()

    async def kill(self) -> None:
        """Every connection is reset, and nobody listens any more."""
        assert self._runner is not None and self._listening is not None
        await end_web_server(self._runner, self._listening, at_once=True)
        self._runner = None

    def define(self, path: str) -> None:
        """Knows a kind of objects from now on, as when its CRD is installed."""
        self._objects[path] = {}

    def undefine(self, path: str) -> None:
        """Does not know a kind of objects any more."""
        del self._objects[path]

    async def put(self, path: str, *objects: Object) -> None:
        """Stores objects."""
        for one in objects:
            await self._store(path, one["metadata"]["name"], one)

    async def delete(self, path: str, name: str) -> None:
        """Deletes one."""
        await self._store(path, name, None)

    async def expire(self) -> None:
        """Forgets all changes: every watch from before has to begin with a list."""
        async with self._news:
            self._version += 1
            self._oldest = self._version
            self._log.clear()
            self._news.notify_all()

    async def _store(self, path: str, name: str, one: Object | None) -> None:
        async with self._news:
            self._version += 1
            before = self._objects[path].pop(name, None)
            if one is not None:
                one = copy.deepcopy(one)
                one["metadata"]["resourceVersion"] = str(self._version)
                self._objects[path][name] = one
            self._log.append((self._version, path, before, one))
            self._news.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query)))
        if self.override is not None:
            return await self.override(request)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return refusal(401, "Unauthorized")
        if request.path not in self._objects:
            return refusal(404, "the server could not find the requested resource")
        return await (self._watch(request) if "watch" in request.query else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        found = [one for _, one in sorted(self._objects[request.path].items()) if selected(one, query)]
        start, limit = int(query.get("continue", "0")), self.page or int(query.get("limit", "500"))
        meta = {"resourceVersion": str(self._version)}
        if start + limit < len(found):
            meta["continue"] = str(start + limit)
        return web.json_response({"kind": "List", "metadata": meta, "items": found[start : start + limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        seen = int(query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while seen >= self._oldest:
                    news = [entry for entry in self._log if entry[0] > seen]
                    for version, path, before, after in news:
                        seen = version
                        if path == request.path and (event := seen_as(before, after, query)) is not None:
                            await response.write(json.dumps(event).encode() + b"\n")
                    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(seen)}}}
                    await response.write(json.dumps(bookmark).encode() + b"\n")
                    async with self._news:
                        if self._version == seen:
                            await self._news.wait()
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
                await response.write(json.dumps(gone).encode() + b"\n")
        except TimeoutError:
            pass
        except ConnectionError:
            return response
        return response


def seen_as(before: Object | None, after: Object | None, query: Any) -> Object | None:
    """What a watcher is told of a change."""
    was, is_now = (one is not None and selected(one, query) for one in (before, after))
    if is_now:
        return {"type": "MODIFIED" if was else "ADDED", "object": after}
    return {"type": "DELETED", "object": before} if was else None


def selected(one: Object, query: Any) -> bool:
    """Whether an object is among those that are asked for."""
    for pair in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = pair.partition("=")
        if one["metadata"].get("labels", {}).get(key) != value:
            return False
    field = query.get("fieldSelector", "")
    return not field or field == f"metadata.name={one['metadata']['name']}"


def refusal(status: int, message: str, **headers: str) -> web.Response:
    """An error as the API answers it."""
    body = {"kind": "Status", "status": "Failure", "message": message, "code": status}
    return web.json_response(
        body, status=status, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


@asynccontextmanager
async def fake_api(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeApi]:
    """A server for the length of a block."""
    api = FakeApi(tls)
    await api.start()
    try:
        yield api
    finally:
        if api._runner is not None:
            await api.kill()
