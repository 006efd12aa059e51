"""vLLM's handshake (NIXL and its likes): prefill answers with an opaque object, decode is sent it with the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_gateway.engines.faults import failure_behind
from kvscout_gateway.request.attempt import Attempt, Reply
from kvscout_gateway.request.plan import PrefillFailed
from kvscout_gateway.values.request import Request

if TYPE_CHECKING:
    from kvscout_gateway.request.exchange import Exchange


@dataclass(slots=True)
class VllmHandover:
    """See `Handover`."""

    warnings: RateLimitedLog

    async def run(self, exchange: Exchange, prefill: Request, decode: Attempt, reply: Reply) -> None:
        """See `Handover`."""
        transfer: Any = None

        async def compute(attempt: Attempt) -> None:
            nonlocal transfer
            document = await attempt.read(await attempt.send(attempt.request.api.prefill, whole_answer=False))
            attempt.prefilled(attempt.dialect.usage(document))
            transfer = document.get("kv_transfer_params")
            if not transfer:
                worker = attempt.decision.worker.worker_id
                self.warnings.warning(
                    worker, "%s answers without kv_transfer_params: the decode worker computes the prompt", worker
                )

        try:
            await exchange.run_attempts(prefill, compute)
        except InvalidArgument as error:
            if not (exchange.request.body.demands_tool_call and failure_behind(error) is not None):
                raise
            # Some releases of vLLM refuse what they have put out: one token is no tool call. Decode computes the
            # prompt, and says so if it is the request that is wrong.
            self.warnings.warning("refused", "prefill refuses a request that demands a tool call: %s", error)
        except KvscoutError as error:
            raise PrefillFailed(error) from error
        await reply.placed(decode.decision)
        # Without an object the decode engine computes the prompt, as it does for any other request.
        await decode.relay(await decode.send({"kv_transfer_params": transfer or None}), reply)
