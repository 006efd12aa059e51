"""vLLM's handshake between a prefill and a decode engine (NIXL, pull): `kv_transfer_params`.

::

    client ── do_remote_decode ──▶ prefill    computes, answers with an opaque object, keeps the blocks for a lease
    client ── that object ───────▶ decode     reserves blocks, pulls ──▶ prefill frees its own
                                              decodes

What the object holds is what vLLM 0.32 puts there; the side channel (ZMQ and RDMA there) is one HTTP request here,
that takes as long as the transfer. A lease that ends, an engine that is gone, hangs or is another one by now, and
another prompt than the one that was computed fail the transfer: the decode engine then computes the prompt itself or,
as vLLM does by default (`kv_load_failure_policy: fail`), ends the request with an error.

Kinder than vLLM: an object with fields missing makes the decode engine recompute (vLLM's request waits without end),
and the cause of a failed transfer is known immediately.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
from aiohttp import web

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_mocker.config import TransferConfig
from kvscout_mocker.engine.kv_transfer import BlockHolder, KvTransfer, TransferFailed
from kvscout_mocker.engine.request import Request
from kvscout_mocker.fields import Fields, integer, json_object
from kvscout_mocker.server import Document, json_body

_log = logging.getLogger(__name__)

PULL_PATH = "/mock/kv_transfer"


class _Held(NamedTuple):
    rank: BlockHolder
    request: Request
    expiry: asyncio.TimerHandle


class Nixl:
    """Both ends of the handshake, for all ranks of a process.

    Args:
        config: Times and what a failure means.
        host: Host at which other engines reach this process.
        ranks: In order of their number.
    """

    def __init__(self, config: TransferConfig, host: str, ranks: Sequence[BlockHolder]) -> None:
        self._config = config
        self._host = host
        self.port = 0
        """Port of this process's HTTP server, known once it is bound."""
        self._engine_ids = {rank: uuid.uuid4().hex for rank in ranks}
        self._held: dict[str, _Held] = {}
        self._session: aiohttp.ClientSession | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the side channel to an application."""
        app.add_routes([web.post(PULL_PATH, self.pulled)])

    async def close(self) -> None:
        """End transfers and forget what is held."""
        for held in self._held.values():
            held.expiry.cancel()
        if self._session is not None:
            await self._session.close()

    def transfer(self, params: Fields | None) -> KvTransfer:
        """Return the transfer that a body's `kv_transfer_params` make of a request."""
        if params is None:
            return KvTransfer()
        if params.get("do_remote_prefill"):
            return _DecodeTransfer(params, self, recomputes=self._config.recomputes)
        return _PrefillTransfer(self) if params.get("do_remote_decode") else KvTransfer()

    def hold(self, rank: BlockHolder, request: Request) -> Document:
        """Hold a finished request's blocks for a lease; return the object that a decode engine pulls them by."""
        loop = asyncio.get_running_loop()
        transfer_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        expiry = loop.call_later(self._config.lease_seconds, self._expire, transfer_id)
        self._held[transfer_id] = _Held(rank, request, expiry)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(request.table.block_ids)],
            "remote_engine_id": self._engine_ids[rank],
            "remote_request_id": transfer_id,
            "remote_host": self._host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached_tokens or 0,
        }

    async def pulled(self, http: web.Request) -> web.StreamResponse:
        """Hand blocks over to a decode engine; the answer goes out when they are there."""
        fields = json_object(await json_body(http))
        held = self._held.get(str(fields.get("request_id")))
        if held is None or self._engine_ids[held.rank] != fields.get("engine_id"):
            raise NotFound("no such transfer: its lease ended, or it was another engine's", field="request_id")
        if held.request.prompt_digest != fields.get("prompt_digest"):
            raise InvalidArgument("another prompt was computed", field="prompt_digest")
        tokens = integer(fields, "tokens", 0, minimum=0, maximum=held.request.prompt_tokens)
        await asyncio.sleep(self._config.seconds(tokens))
        self._free(str(fields["request_id"]), expired=False)
        return web.json_response({"tokens": tokens})

    async def pull(self, params: Fields, request: Request, tokens: int) -> None:
        """Pull the blocks that an object of a prefill engine names.

        Raises:
            TransferFailed: They do not come.
        """
        try:
            host, port = params["remote_host"], params["remote_port"]
            body = {
                "engine_id": params["remote_engine_id"],
                "request_id": params["remote_request_id"],
                "prompt_digest": request.prompt_digest,
                "tokens": tokens,
            }
            if not params["remote_block_ids"]:
                raise KeyError("remote_block_ids")
        except KeyError as missing:
            raise TransferFailed(f"kv_transfer_params without {missing}") from None
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_seconds + self._config.seconds(tokens))
        try:
            async with self._session.post(f"http://{host}:{port}{PULL_PATH}", json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    raise TransferFailed(f"{host}:{port} answered {answer.status}: {(await answer.text())[:200]}")
        except TimeoutError:
            raise TransferFailed(f"{host}:{port} did not answer in time") from None
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise TransferFailed(f"{host}:{port}: {str(error) or type(error).__name__}") from None

    def _expire(self, transfer_id: str) -> None:
        _log.warning("no decode engine fetched the blocks of %s within %g s", transfer_id, self._config.lease_seconds)
        self._free(transfer_id, expired=True)

    def _free(self, transfer_id: str, *, expired: bool) -> None:
        held = self._held.pop(transfer_id, None)
        if held is not None:  # else its lease ended while it was on its way
            held.expiry.cancel()
            held.rank.release(held.request, expired=expired)


class _PrefillTransfer(KvTransfer):
    holds = True

    def __init__(self, nixl: Nixl) -> None:
        self._nixl = nixl

    def done(self, request: Request, rank: BlockHolder) -> Document:
        return {"kv_transfer_params": self._nixl.hold(rank, request)}


class _DecodeTransfer(KvTransfer):
    def __init__(self, params: Fields, nixl: Nixl, *, recomputes: bool) -> None:
        self.source = self
        self.recomputes = recomputes
        self._params = params
        self._nixl = nixl

    async def fetch(self, request: Request, tokens: int) -> None:
        await self._nixl.pull(self._params, request, tokens)

    def cached_tokens(self, request: Request) -> int:
        cached = self._params.get("remote_prefill_cached_tokens")
        return cached if isinstance(cached, int) else super().cached_tokens(request)


def reachable_host(host: str) -> str:
    """Return the address at which others reach a process bound to `host`: this machine's, if it is bound to all."""
    if host not in ("0.0.0.0", "::", "*"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
