"""/busy_threshold: reads and changes when a worker counts as busy. JSON → the schedulers' messages → JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvscout.v1 import types_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.http.http import Charge, HttpCall
from kvscout_gateway.fronts.access import Caller
from kvscout_gateway.fronts.body import JsonBody, json_of, model_of, respond_json
from kvscout_gateway.upstreams.interfaces import Scheduler

FIELDS: Final = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")
MAX_VALUE: Final = 1 << 64


class Thresholds:
    """Answers requests for /busy_threshold."""

    def __init__(self, scheduler: Scheduler, charge: Callable[[str], Charge]) -> None:
        """Answer requests.

        Args:
            scheduler: Has the thresholds.
            charge: Returns what is charged for a body, by tenant.
        """
        self._scheduler = scheduler
        self._charge = charge

    async def answer(self, call: HttpCall, caller: Caller) -> None:
        """Answer one request."""
        if call.method == "GET":
            everything = types_pb2.ListBusyThresholdsRequest(tenant=caller.tenant)
            listed = await self._scheduler.call(lambda stub: stub.ListBusyThresholds, everything)
            await respond_json(call, {"thresholds": [shown(one) for one in listed.thresholds]})
            return
        change = change_of(await json_of(call, self._charge(caller.tenant)), caller.tenant)
        if isinstance(change, types_pb2.SetBusyThresholdsRequest):
            caller.require("SetBusyThresholds")
            await respond_json(call, shown((await self._scheduler.set_busy_thresholds(change)).thresholds))
            return
        read = await self._scheduler.call(lambda stub: stub.GetBusyThresholds, change)
        await respond_json(call, shown(read.thresholds))


def change_of(body: JsonBody, tenant: str) -> types_pb2.SetBusyThresholdsRequest | types_pb2.GetBusyThresholdsRequest:
    """Return what a POST asks for: without a threshold in it, only to read.

    Raises:
        InvalidArgument: A field is missing, or of the wrong type; the schedulers judge its range.
    """
    model = model_of(body.fields)
    named = [name for name in FIELDS if name in body.fields]
    if not named:
        return types_pb2.GetBusyThresholdsRequest(model=model, tenant=tenant)
    change = types_pb2.SetBusyThresholdsRequest(model=model, tenant=tenant)
    for name in named:
        value = body.get(name)
        if value is None:
            change.clear.append(name)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_VALUE:
            raise InvalidArgument("must be a number, or null to turn it off", field=name)
        elif name == FIELDS[1] and (value != int(value) or value < 0):
            raise InvalidArgument("must be a number of tokens", field=name)
        else:
            setattr(change, name, float(value) if name == FIELDS[0] else int(value))
    return change


def shown(thresholds: types_pb2.BusyThresholds) -> dict[str, Any]:
    """Return all three fields; null where unset."""
    values = {name: getattr(thresholds, name) if thresholds.HasField(name) else None for name in FIELDS}
    return {"model": thresholds.model, **values}
