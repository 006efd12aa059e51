"""Traces: off they are nothing; on they go where they are sent to, and requests wait for none of it."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.free_ports import free_ports
from support.otlp_receiver import otlp_receiver

from kvscout_common.errors import ConfigError, NotFound
from kvscout_common.http.http import SinkGone
from kvscout_common.observability import tracing
from kvscout_common.observability.log_lines import JsonFormatter, about_request

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


async def traced(use: Callable[[], object], *, ratio: float = 1.0) -> list[Any]:
    """The spans that come of something."""
    async with otlp_receiver() as receiver:
        stop = tracing.start("test", receiver.url, ratio=ratio, version="1")
        try:
            use()
        finally:
            await asyncio.to_thread(stop)
        assert not tracing.enabled()
        return receiver.spans


def test_off_a_span_is_nothing_and_nothing_of_opentelemetry_is_imported() -> None:
    assert not tracing.enabled()
    with tracing.span("x", tracing.SpanKind.SERVER, parent=CALLER) as span:
        assert span is tracing.NOTHING
        assert (tracing.traceparent(), tracing.call_options(), tracing.ids()) == ("", {}, {})
    services = "kvscout_gateway.main, kvscout_indexer.main, kvscout_scheduler.main"
    program = f"import sys, {services}; sys.exit(any(n.startswith('opentelemetry') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_a_span_is_part_of_its_callers_trace_and_what_is_begun_in_it_is_part_of_it() -> None:
    told = []

    def use() -> None:
        with tracing.span("outer", tracing.SpanKind.SERVER, parent=CALLER) as outer:
            outer.record(worker="w", cost=1.5)
            with tracing.span("inner", tracing.SpanKind.CLIENT):
                told.append(tracing.traceparent())
            aside = tracing.span("aside").begun()
            told.append(tracing.traceparent())
            aside.end()
            aside.end()

    inner, aside, outer = await traced(use)
    assert [inner.name, aside.name, outer.name] == ["inner", "aside", "outer"]
    assert {one.trace for one in (inner, aside, outer)} == {TRACE}
    assert (outer.parent, inner.parent, aside.parent) == ("b7ad6b7169203331", outer.id, outer.id)
    assert outer.facts == {"kvscout.worker": "w", "kvscout.cost": 1.5}
    assert told == [f"00-{TRACE}-{inner.id}-01", f"00-{TRACE}-{outer.id}-01"]


async def test_an_error_is_told_by_its_kind_and_without_its_words() -> None:
    def use() -> None:
        with pytest.raises(NotFound), tracing.span("x"):
            raise NotFound("no such model: what the engine quotes")
        for gone in (asyncio.CancelledError(), SinkGone()):
            with pytest.raises(type(gone)), tracing.span("y"):
                raise gone

    failed, cancelled, left = await traced(use)
    assert (left.failed, left.facts) == (False, cancelled.facts)
    assert (failed.failed, failed.facts) == (True, {"error.type": "NotFound"})
    assert (cancelled.failed, cancelled.facts) == (False, {"kvscout.outcome": "cancelled"})
    assert "quotes" not in repr(failed)


@pytest.mark.parametrize("parent", ["", "00-zz-b7ad6b7169203331-01", "rubbish" * 1000])
async def test_what_is_no_trace_context_begins_a_trace_where_one_in_so_many_is_wanted(parent: str) -> None:
    def use() -> None:
        with tracing.span("x", tracing.SpanKind.SERVER, parent=parent):
            pass
        with tracing.span("y", tracing.SpanKind.SERVER, parent=CALLER):
            pass

    x, y = await traced(use)
    assert (x.parent, y.trace) == ("", TRACE)
    assert [one.name for one in await traced(use, ratio=0.0)] == ["y"]


async def test_lines_of_json_say_which_request_and_which_trace_they_are_about() -> None:
    record = logging.LogRecord("kvscout.test", logging.WARNING, "test.py", 1, "text", (), None)
    lines: list[dict[str, Any]] = []

    def use() -> None:
        with tracing.span("x", parent=CALLER), about_request("r-1\n"):
            lines.append(json.loads(JsonFormatter().format(record)))

    [span] = await traced(use)
    assert lines[0]["request_id"].startswith("r-1")
    assert "\n" not in lines[0]["request_id"]
    assert (lines[0]["trace_id"], lines[0]["span_id"]) == (TRACE, span.id)
    assert not {"request_id", "trace_id"} & json.loads(JsonFormatter().format(record)).keys()


async def test_a_receiver_that_refuses_or_is_not_there_costs_its_spans_only(caplog: pytest.LogCaptureFixture) -> None:
    (nobody,) = free_ports(1)
    async with otlp_receiver() as receiver:
        receiver.refuses = True
        for url in (receiver.url, f"http://127.0.0.1:{nobody}"):
            stop = tracing.start("test", url, ratio=1.0, version="1")
            with tracing.span("x"):
                pass
            await asyncio.to_thread(stop)
        assert receiver.spans == []
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http://[::1", "http://x:99999"])
def test_an_endpoint_that_is_none_is_refused_by_its_flag(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: must be http"):
        tracing.check_endpoint(endpoint)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint: needs OpenTelemetry .* pip install 'kvscout\[otel\]'"):
        tracing.start("test", "http://127.0.0.1:1", ratio=1.0, version="1")
    assert not tracing.enabled()
