"""The dashboard's page in a real Chromium, with states that tests make up: devices, themes, sizes, hours."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from importlib.resources import files
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from support.browser import CHROMIUM, MISSING, browser
from support.browser_page import CONTRAST, opened, until
from support.scripted_dashboard import ScriptedDashboard, decision, failure, moment, point, scripted_dashboard

from kvscout.v1 import indexer_pb2
from kvscout_gateway.engines.causes import Cause
from kvscout_gateway.fronts.dashboard import page as page_folder
from kvscout_gateway.fronts.dashboard.document import failures

pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not CHROMIUM, reason=MISSING),
    pytest.mark.services_only,
]
LAPTOP: dict[str, Any] = {"viewport": {"width": 1360, "height": 850}}
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 812}, "is_mobile": True, "has_touch": True}
NOW = time.time()
IDS = [f"gen-8de15c117fc841678608a74c3c1d{index:04}" for index in range(20)]
DECISIONS = [decision(one, NOW - index, 60, (80, 95)) for index, one in enumerate(IDS)]
FOUND: dict[str, Any] = {
    "id": "x",
    "severity": "error",
    "what": "A worker gets no requests.",
    "evidence": ["worker w3/0 does not answer"],
    "remedy": "Start it.",
}
OTHER = FOUND | {"id": "y", "severity": "warning", "what": "Events of a worker are missing."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def dashboard() -> AsyncIterator[ScriptedDashboard]:
    async with scripted_dashboard() as one:
        one.send("history", [point(NOW - 600 + 10 * index) for index in range(60)])
        one.send("doctor", {"at": NOW, "findings": []})
        one.show(moment(Random(1), 8), NOW, *DECISIONS)
        yield one


async def shows_workers(page: Any, count: int = 8) -> None:
    await until(page, f"document.querySelectorAll('#workers tbody tr').length === {count}", f"{count} workers")


async def test_the_first_line_says_what_is_saved_and_what_was_possible(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page)
        saved = (await page.inner_text("#savings")).replace("\u202f", " ")
        assert "Prompt tokens not computed" in saved
        assert " M\nof 8 M since the start" in saved
        assert "GPU seconds saved" in saved
        assert "estimated, at 75 µs a token" in saved
        assert "97.0 % of what was possible" in saved
        assert "✓ All is well." in await page.inner_text("#doctor-line")
        assert await page.locator("#doctor").is_hidden()


@pytest.mark.parametrize("device", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_stands_out_and_nothing_is_wider_than_the_screen(
    dashboard: ScriptedDashboard, chromium: Any, device: dict[str, Any], scheme: str
) -> None:
    async with opened(chromium, dashboard.url, color_scheme=scheme, **device) as page:
        await shows_workers(page)
        dashboard.show(moment(Random(2), 8, left_out=(3,)), NOW, *DECISIONS)
        dashboard.send("doctor", {"at": NOW, "findings": [FOUND, OTHER]})
        dashboard.send("failures", failures([failure(2, NOW, Cause.REQUEST), failure(1, NOW)], []))
        await until(page, "!document.getElementById('doctor').hidden", "a finding")
        await until(page, "!document.getElementById('failures-section').hidden", "a failure")
        await page.locator("#doctor summary").click()
        await page.locator("#decisions .toggle").first.click()
        await page.locator("#services-section summary").click()
        assert await page.evaluate(CONTRAST) == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= device["viewport"]["width"]
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) / 3
        assert (brightness < 60) == (scheme == "dark")


async def test_on_a_phone_eight_workers_take_two_screens(dashboard: ScriptedDashboard, chromium: Any) -> None:
    async with opened(chromium, dashboard.url, **PHONE) as page:
        await shows_workers(page)
        assert await page.evaluate("document.documentElement.scrollHeight") <= 2 * 812


async def test_of_a_thousand_workers_the_first_are_shown_and_all_are_found(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    size = dashboard.show(moment(Random(3), 1000, left_out=(700,)), NOW, *DECISIONS)
    assert size < 128 * 1024
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page, 10)
        assert (await page.inner_text("#workers tbody tr >> nth=0")).startswith("w700/0")
        await page.get_by_role("button", name="Show 100 more of 1,000").click()
        await shows_workers(page, 110)
        await page.get_by_role("searchbox").fill("w999")
        await shows_workers(page, 1)
        await page.get_by_role("searchbox").fill("left out")
        await shows_workers(page, 1)
        assert "1 found" in await page.inner_text("#workers-summary")


async def test_hours_of_updates_move_nothing_and_leave_nothing_behind(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    draw = Random(4)
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page)
        await page.evaluate(
            "window.moved = 0;"
            "new PerformanceObserver((list) => list.getEntries().forEach((one) => (moved += one.value)))"
            ".observe({ type: 'layout-shift' })"
        )

        async def sizes(first: int, last: int) -> tuple[int, int]:
            for index in range(first, last):
                fresh = [decision(f"r-{index}-{each}-abcdefgh", NOW + index, 40 + each, (90,)) for each in range(20)]
                dashboard.show(moment(draw, 8, requests=5_000 + index), NOW + index, *fresh)
                if index % 5 == 0:
                    dashboard.send("history", [point(NOW + index - 10 * each) for each in reversed(range(360))])
            id_shown = f"document.querySelector('#decisions button.id')?.dataset.full === 'r-{last - 1}-0-abcdefgh'"
            await until(page, id_shown, "the last update")
            session = await page.context.new_cdp_session(page)
            await session.send("HeapProfiler.collectGarbage")
            counts = await session.send("Memory.getDOMCounters")
            await session.detach()
            return counts["nodes"], counts["jsEventListeners"]

        before, after = await sizes(0, 200), await sizes(200, 600)
        assert after[0] < 1.2 * before[0]
        assert after[1] < 1.2 * before[1]
        assert await page.evaluate("moved") < 0.01


async def test_lone_values_are_strokes_and_all_charts_share_one_axis(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    points = [point(NOW - 600 + 10 * index, hit=0.7 if index == 20 or index > 40 else None) for index in range(60)]
    dashboard.send("history", points)
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page)
        await until(page, "document.querySelectorAll('#plots .strip:first-child path.first').length === 2", "two lines")
        assert await page.locator("#plots circle").count() == 0
        widths = await page.evaluate(
            "[...document.querySelectorAll('#plots path.first')].map((one) => one.getBBox().width)"
        )
        assert min(widths) >= 6
        assert await page.locator("#plots .axis text").count() >= 3
        assert await page.locator("#plots .strip:not(.axis) text[text-anchor=middle]").count() == 0
        await page.locator("#plots").focus()
        await page.keyboard.press("End")
        await page.keyboard.press("ArrowLeft")
        assert await page.locator("#plots .cross").count() == 5
        assert "Hit rate: cached 70.0\u202f%" in await page.inner_text("#announcement")


async def test_a_request_id_is_short_shown_in_full_on_focus_and_copied_on_a_click(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, dashboard.url, permissions=["clipboard-read", "clipboard-write"], **LAPTOP) as page:
        await shows_workers(page)
        shown = page.locator("#decisions button.id").first
        assert await shown.inner_text() == f"…{IDS[0][-8:]}"
        await shown.focus()
        full = await shown.evaluate("(one) => getComputedStyle(one, '::after').content")
        assert full == f'"{IDS[0]}"'
        await page.keyboard.press("Enter")
        await until(page, f"document.getElementById('announcement').textContent === 'copied: {IDS[0]}'", "it is copied")
        assert await page.evaluate("navigator.clipboard.readText()") == IDS[0]


async def test_the_first_finding_is_a_line_and_the_rest_is_folded(dashboard: ScriptedDashboard, chromium: Any) -> None:
    dashboard.send("doctor", {"at": NOW, "findings": [FOUND, OTHER]})
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await until(page, "!document.getElementById('doctor').hidden", "a finding")
        line = await page.inner_text("#doctor-line")
        assert line.startswith("✕ A worker gets no requests. worker w3/0 does not answer")
        assert await page.inner_text("#doctor-more") == "What to do, and 1\u00a0more finding"
        assert await page.locator("#findings").is_hidden()
        await page.locator("#doctor-more").focus()
        await page.keyboard.press("Enter")
        assert "Start it." in await page.inner_text("#findings")


async def test_failures_are_listed_with_cause_worker_and_id_and_callers_mistakes_apart(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    failed = [failure(9, NOW, Cause.REQUEST), *(failure(8 - index, NOW - index) for index in range(5))]
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page)
        assert await page.locator("#failures-section").is_hidden()
        dashboard.send("failures", failures(failed, [failure(1, NOW, Cause.INDEXER, answered=True)]))
        await until(page, "document.querySelectorAll('#failures tbody tr').length === 3", "the last failures")
        mistake, broken, _ = await page.locator("#failures tbody tr").all_inner_texts()
        assert "○ request" in mistake
        assert "caller" in mistake
        for part in ("✕ worker", "engine", "connection broke", "/v1/chat/completions · 502", "w0", "…3c1d0008"):
            assert part in broken
        assert "3\nand 5 by callers" in await page.inner_text("#now")
        await page.get_by_role("button", name="Show 3 more").click()
        assert await page.locator("#failures tbody tr").count() == 6
        await page.get_by_role("button", name="Answered anyway").click()
        (late,) = await page.locator("#failures tbody tr").all_inner_texts()
        assert "✕ indexer" in late
        dashboard.send("failures", failures([], [failure(2, NOW, Cause.TOKENS, answered=True)]))
        await until(page, "document.getElementById('answered').hidden", "none failed")
        assert "✕ tokens" in await page.inner_text("#failures tbody")


async def test_what_services_say_at_once_is_said_before_doctor_looks_again(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    dashboard.show(moment(Random(1), 8), NOW, troubles=["policy-failing: policy 'mine' raises at every request"])
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await shows_workers(page)
        assert (await page.inner_text("#doctor-line")).startswith("▲ policy 'mine' raises at every request")


async def test_a_model_whose_name_would_end_a_shell_word_stays_one(dashboard: ScriptedDashboard, chromium: Any) -> None:
    now = moment(Random(1), 1, requests=0)
    for worker in now.snapshot.workers.values():
        worker.model = "x'; echo broken; '"
    for _, status in now.snapshot.statuses(indexer_pb2.IndexerGetStatusResponse):
        status.sources[0].model = "x'; echo broken; '"
    dashboard.show(now, NOW)
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await page.locator("#try").wait_for()
        assert """'{"model":"x'\\''; echo broken; '\\''",""" in await page.inner_text("#try-command")


NUMBERS = {
    "figure(null)": "–",
    "figure(0)": "0",
    "figure(7)": "7",
    "figure(1234)": "1,234",
    "figure(9999)": "9,999",
    "figure(10000)": "10 k",
    "figure(12345)": "12.3 k",
    "figure(999949)": "1 M",
    "figure(3460000)": "3.46 M",
    "figure(8.42e12)": "8420 G",
    "figure(24.257)": "24.3",
    "figure(0.1)": "0.1",
    "figure(4.44, 2)": "4.4",
    "figure(1234.5)": "1,235",
    "percent(0.7612)": "76.1 %",
    "percent(1)": "100 %",
    "percent(0)": "0 %",
    "seconds(0)": "0",
    "seconds(75e-6)": "75 µs",
    "seconds(0.0084)": "8.4 ms",
    "seconds(0.16)": "160 ms",
    "seconds(1.234)": "1.2 s",
    "seconds(100)": "100 s",
    "seconds(3600)": "60 min",
    "seconds(90000)": "25 h",
    "many(1, 'rank')": "1 rank",
    "many(1200, 'rank')": "1,200 ranks",
}


async def test_numbers_are_written_in_one_way(chromium: Any) -> None:
    text = (files(page_folder) / "text.js").read_text("utf-8")
    page = await chromium.new_page()
    written = await page.evaluate(f"() => {{ {text}\nreturn [{', '.join(NUMBERS)}]; }}")
    await page.close()
    plain = [one.replace("\u202f", " ").replace("\u00a0", " ") for one in written]
    assert dict(zip(NUMBERS, plain, strict=True)) == NUMBERS
