"""Headers of the Gateway API Inference Extension's conformance tests, beyond the protocol. Pure.

Their requests name the endpoints that they are to go to, and their answers name the one that they went to. Any
client could send its requests where it likes by that: it is for test runs only (`--endpoint-picker-conformance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest

SELECTION: Final = "test-epp-endpoint-selection"
"""Request header: endpoints with commas, ip:port or ip."""
SERVED: Final = "x-conformance-test-served-endpoint"
"""Response header: endpoint that served, as the proxy says."""
SELECTED: Final = "x-conformance-test-selected-endpoint"
"""Response header: endpoint that was picked."""
UNTOLD: Final = "fail: missing destination endpoint served metadata"


def steered(asked: PickRequest, headers: Mapping[str, str]) -> PickRequest:
    """Return a request as its test wants it placed: at one of the endpoints it names, whatever model runs there."""
    named = wire.endpoints_in(headers.get(SELECTION, ""))
    return asked._replace(model="", size=0, subset=named) if named else asked


def report(response: pb.ProcessingRequest, picked: str) -> dict[str, str]:
    """Return the headers of a response that name its endpoint.

    Args:
        response: Its headers, as the proxy shows them.
        picked: The endpoints that were picked.
    """
    return {SERVED: wire.served_by_metadata(response) or UNTOLD, SELECTED: picked.partition(",")[0]}
