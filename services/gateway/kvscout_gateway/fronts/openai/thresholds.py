"""/busy_threshold: reads and changes when a worker counts as busy. JSON → the schedulers' messages → JSON."""

from __future__ import annotations

from typing import Any, Final

from kvscout.v1 import types_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_gateway.fronts.json_request import model_of
from kvscout_gateway.fronts.body import JsonBody

FIELDS: Final = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")
MAX_VALUE: Final = 1 << 64


def change_of(body: JsonBody, tenant: str) -> types_pb2.SetBusyThresholdsRequest | types_pb2.GetBusyThresholdsRequest:
    """What a POST asks for: without a threshold in it, only to read.

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
    """All three fields; null where unset."""
    values = {name: getattr(thresholds, name) if thresholds.HasField(name) else None for name in FIELDS}
    return {"model": thresholds.model, **values}
