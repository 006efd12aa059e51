"""What several gateways in shadow mode come to together, from values alone."""

from __future__ import annotations

from typing import Any

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.shadow import Shadow, sentences, shadow_of
from kvscout_common.doctor.snapshot import Service, ServiceKind, Snapshot


def hour(begin: int, **fields: Any) -> gateway_pb2.ShadowHour:
    return gateway_pb2.ShadowHour(begin_unix_seconds=begin, tenant="t", model="m", **fields)


def seen(*gateways: gateway_pb2.GatewayGetStatusResponse) -> Shadow:
    services = (Service(f"g:{index}", ServiceKind.GATEWAY, status=status) for index, status in enumerate(gateways))
    return shadow_of(Snapshot(tuple(services)))


def test_hours_of_all_gateways_are_added_the_newest_first() -> None:
    compared = {"requests": 10, "compared": 8, "prompt_tokens": 800, "cached_tokens": 200, "policy_cached_tokens": 600}
    first = gateway_pb2.GatewayGetStatusResponse(
        shadowed_balancer="http://b", shadow_hours=[hour(0, **compared), hour(3600, left_out={"late": 2})]
    )
    second = gateway_pb2.GatewayGetStatusResponse(
        shadowed_balancer="http://b",
        shadow_hours=[
            hour(
                3600,
                **compared,
                left_out={"late": 1, "usage": 4},
                served_known=8,
                same_worker=2,
                same_worker_prompt_tokens=200,
                same_worker_error_tokens=10,
            )
        ],
    )
    shadow = seen(first, second)
    assert shadow.balancers == ("http://b",)
    assert [row.begin_unix_seconds for row in shadow.hours] == [3600, 0]
    newest = shadow.hours[0]
    assert (newest.requests, newest.left_out) == (10, {"late": 3, "usage": 4})
    assert newest.shares == {
        "hit_rate": 0.25,
        "policy_hit_rate": 0.75,
        "same_worker_share": 0.25,
        "prediction_error": 0.05,
    }
    assert list(sentences(shadow)) == [
        "http://b decides; 20 requests were passed on, 16 of them compared.",
        "25.0 % of their prompt tokens were cached; with the policy it would have been 75.0 %.",
        "2 went where the policy would have sent them; there the prediction was wrong by 5.0 % of the prompt tokens.",
        "Not compared: 4 whose engine does not say what was cached (vLLM: --enable-prompt-tokens-details).",
        "Not compared: 3 whose output began before the policy had decided.",
    ]


def test_a_balancer_that_does_not_say_who_served_is_told_of_the_flag() -> None:
    status = gateway_pb2.GatewayGetStatusResponse(
        shadowed_balancer="http://b", shadow_hours=[hour(0, requests=1, compared=1, prompt_tokens=10)]
    )
    assert "The balancer does not say which worker served (--shadow-served-by)." in sentences(seen(status))
    assert seen(status).hours[0].shares["same_worker_share"] is None


def test_where_nobody_shadows_there_is_nothing() -> None:
    shadow = seen(gateway_pb2.GatewayGetStatusResponse(requests=5))
    assert (shadow.balancers, shadow.hours, shadow.total.hit_rate) == ((), (), None)
