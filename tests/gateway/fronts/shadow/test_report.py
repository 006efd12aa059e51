"""What is counted in shadow mode, from values alone."""

from __future__ import annotations

import pytest

from kvscout_common.errors import ConfigError
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.fronts.shadow.config import ShadowConfig
from kvscout_gateway.fronts.shadow.report import HOUR, MAX_HOURS, Comparison, LeftOut, ShadowReport

AT = 1000 * HOUR


def test_requests_are_counted_in_the_hour_in_which_they_came() -> None:
    report = ShadowReport()
    report.add(AT + 5, "t", "m", Comparison(prompt=100, cached=20, policy=80, same=False))
    report.add(AT + HOUR - 0.1, "t", "m", Comparison(prompt=100, cached=60, policy=64, same=True))
    report.add(AT + HOUR, "t", "m", LeftOut.HELPERS)
    (first, span), (second, later) = report.hours()
    assert (first.begin, second.begin) == (AT, AT + HOUR)
    sums = span.sums
    assert (span.requests, sums.compared, sums.prompt_tokens) == (2, 2, 200)
    assert (sums.cached_tokens, sums.policy_cached_tokens) == (80, 144)
    assert (sums.served_known, sums.same_worker, sums.same_worker_error_tokens) == (2, 1, 4)
    assert (later.requests, later.reasons()) == (1, {"helpers": 1})
    ((_, total),) = report.totals()
    assert (total.requests, total.sums.compared) == (3, 2)


def test_an_engine_that_never_tells_of_cached_tokens_is_not_compared_and_one_that_does_said_0_before() -> None:
    report = ShadowReport()
    for _ in range(2):
        report.add(AT, "t", "m", Comparison(prompt=100, cached=None, policy=50, same=None))
        report.add(AT, "t", "mute", Comparison(prompt=100, cached=None, policy=50, same=None))
    assert [span.reasons() for _, span in report.hours()] == [{"usage": 2}, {"usage": 2}]
    report.add(AT + HOUR, "t", "m", Comparison(prompt=100, cached=30, policy=50, same=None))
    report.add(AT + HOUR, "t", "m", Comparison(prompt=100, cached=None, policy=50, same=None))
    told = {(hour.begin, hour.model): span for hour, span in report.hours()}
    assert told[AT, "mute"].reasons() == {"usage": 2}
    assert told[AT, "m"].reasons() == {}
    assert (told[AT, "m"].sums.compared, told[AT, "m"].sums.cached_tokens) == (2, 0)
    assert (told[AT + HOUR, "m"].sums.compared, told[AT + HOUR, "m"].sums.cached_tokens) == (2, 30)


def test_the_oldest_hours_go() -> None:
    report = ShadowReport()
    for hour in range(MAX_HOURS + 3):
        report.add(AT + hour * HOUR, "t", "m", LeftOut.TOKENS)
    begins = [hour.begin for hour, _ in report.hours()]
    assert (len(begins), begins[0]) == (MAX_HOURS, AT + 3 * HOUR)
    ((_, total),) = report.totals()
    assert total.requests == MAX_HOURS + 3


@pytest.mark.parametrize(
    ("url", "header", "field"),
    [
        ("balancer:80", "x", "shadow"),
        ("ftp://b", "x", "shadow"),
        ("http://user:pass@b", "x", "shadow"),
        ("http://b/path", "x", "shadow"),
        ("http://b?x=1", "x", "shadow"),
        ("http://b", "", "shadow_served_by"),
        ("http://b", "a header", "shadow_served_by"),
    ],
)
def test_what_is_no_balancer_or_no_header_is_refused_by_the_flags_name(url: str, header: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ShadowConfig.from_flags({"shadow": url, "shadow_served_by": header})
    assert refused.value.field == field


def test_a_balancer_is_shadowed_over_http_and_without_an_endpoint_picker() -> None:
    assert ShadowConfig.from_flags({"shadow": "", "shadow_served_by": "x"}) is None
    shadow = ShadowConfig.from_flags({"shadow": "https://b:8443/", "shadow_served_by": "X-Upstream"})
    assert shadow == ShadowConfig("https://b:8443", "x-upstream")
    with pytest.raises(ConfigError):
        GatewayConfig(shadow=shadow, http_port=-1)
    with pytest.raises(ConfigError):
        GatewayConfig(shadow=shadow, http_port=0, endpoint_picker=EndpointPickerConfig(0))
