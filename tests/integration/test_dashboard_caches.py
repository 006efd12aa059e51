"""The dashboard's pages "Hit rate" and "Requests" in a real Chromium, with states that tests make up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from support.browser import CHROMIUM, MISSING, browser
from support.browser_page import CONTRAST, opened, until
from support.scripted_dashboard import ScriptedDashboard, heat, ladder, moment, point, scripted_dashboard, timeline

from kvscout.v1 import gateway_pb2
from kvscout_gateway.fronts.dashboard.ladder_rows import ladders_document

pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not CHROMIUM, reason=MISSING),
    pytest.mark.services_only,
]
LAPTOP: dict[str, Any] = {"viewport": {"width": 1360, "height": 850}}
PHONE: dict[str, Any] = {"viewport": {"width": 375, "height": 812}, "is_mobile": True, "has_touch": True}
NOW = time.time()
LATER = ladder(session_class=gateway_pb2.SESSION_CLASS_LATER_TURN, requests=400, prompt_tokens=900_000)


def ladders(*five_minutes: gateway_pb2.Ladder, on: bool = True) -> dict[str, Any]:
    hour = [ladder(requests=7_000)]
    return {"on": on, "windows": {300: ladders_document(five_minutes), 3600: ladders_document(hour) if on else []}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def dashboard() -> AsyncIterator[ScriptedDashboard]:
    async with scripted_dashboard() as one:
        one.send("history", [point(NOW - 600 + 10 * index) for index in range(60)])
        one.send("doctor", {"at": NOW, "findings": []})
        one.send("ladders", ladders(ladder(), LATER))
        one.send("prefixes", heat(4))
        last = [timeline("moved-once", NOW, "w1/0", "w2/0"), timeline("smooth", NOW - 1, "w0/0")]
        one.send("requests", {"last": last, "slowest": last[:1]})
        one.show(moment(Random(1), 4), NOW)
        yield one


async def follow(page: Any, name: str) -> None:
    """Goes to a page by its link."""
    await until(page, "!document.getElementById('board').hidden", "the board")
    await page.get_by_role("link", name=name).click()


def plain(text: str) -> str:
    return text.replace("\u202f", " ").replace("\u00a0", " ")


@pytest.mark.parametrize("device", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_every_page_texts_stand_out_and_nothing_is_wider_than_the_screen(
    dashboard: ScriptedDashboard, chromium: Any, device: dict[str, Any], scheme: str
) -> None:
    async with opened(chromium, dashboard.url, color_scheme=scheme, **device) as page:
        for name, shown in (("Hit rate", "#ladder tbody tr"), ("Requests", "#timelines li")):
            await follow(page, name)
            await page.locator(shown).first.wait_for()
            if name == "Requests":
                await page.locator("#timelines .toggle").first.click()
            assert await page.evaluate(CONTRAST) == [], name
            assert await page.evaluate("document.documentElement.scrollWidth") <= device["viewport"]["width"], name
        await follow(page, "Overview")
        await page.locator("#workers tbody tr").first.wait_for()
        assert await page.locator("#timelines-section").is_hidden()


async def test_the_waterfall_goes_down_from_all_tokens_to_the_actual_ones_and_marks_the_largest_loss(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await follow(page, "Hit rate")
        await until(page, "document.querySelectorAll('#ladder tbody tr').length === 10", "five rungs and five losses")
        [largest] = await page.locator("#ladder tr.largest").all_inner_texts()
        for part in ("▲ expired", "−30 %", "22 s", "2 more workers or 50 % more KV would bring 20."):
            assert part in plain(largest).replace("30.0", "30")
        assert "30 points: expired" in await page.inner_text("#ladder-verdict")
        edges = await page.evaluate(
            "[...document.querySelectorAll('#ladder .bar i')].map((one) => {"
            "const bar = one.parentElement.getBoundingClientRect(), box = one.getBoundingClientRect();"
            "return [(box.left - bar.left) / bar.width, (box.right - bar.left) / bar.width]; })"
        )
        losses = [edge for edge in edges if edge[0] > 0.05]
        assert losses[0][1] == pytest.approx(1.0, abs=0.01), "the first loss ends at all tokens"
        for upper, lower in pairwise(losses):
            assert lower[1] == pytest.approx(upper[0], abs=0.01), "each begins where the one above it ends"
        assert "one block in 2" in await page.inner_text("#ladder-notes")
        label = plain(await page.get_attribute("#sizes", "aria-label"))
        assert "50.0 % at 1 times the size, 60.0 % at 1.25" in label
        assert label.endswith("80.0 % unbounded. Cached now: 39.0 %.")


async def test_session_class_and_window_are_chosen_by_keyboard_and_stay_chosen(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, f"{dashboard.url}#hit-rate", **LAPTOP) as page:
        await until(page, "document.querySelectorAll('#ladder tbody tr').length === 10", "the ladder")
        assert await page.locator("#ladder-model").is_hidden(), "there is one only"
        await page.locator("#ladder-sessions").focus()
        await page.keyboard.press("ArrowDown")
        await until(page, "document.getElementById('ladder-summary').textContent.includes('400')", "later turns")
        dashboard.send("ladders", ladders(ladder(requests=601), LATER))
        await page.locator("#ladder-window").select_option("3600")
        await until(page, r"/7.000/.test(document.getElementById('ladder-summary').textContent)", "the hour")
        await page.locator("#ladder-window").select_option("300")
        await until(page, "document.getElementById('ladder-sessions').value === 'later turn'", "as it was chosen")


async def test_two_models_are_told_apart_and_no_ladder_says_why(dashboard: ScriptedDashboard, chromium: Any) -> None:
    async with opened(chromium, f"{dashboard.url}#hit-rate", **LAPTOP) as page:
        await until(page, "document.querySelectorAll('#ladder tbody tr').length === 10", "the ladder")
        dashboard.send("ladders", ladders(ladder(), ladder("<b>other</b>", requests=9)))
        await page.locator("#ladder-model").select_option("<b>other</b>")
        await until(page, "document.getElementById('ladder-summary').textContent.startsWith('<b>other</b> · 9')", "it")
        dashboard.send("ladders", ladders())
        await until(page, "/No request/.test(document.getElementById('ladder-summary').textContent)", "an empty window")
        dashboard.send("ladders", ladders(on=False))
        await until(page, "/--no-ladder/.test(document.getElementById('ladder-summary').textContent)", "the reason")
        assert await page.locator("#ladder, #sizes-section, #ladder-window").evaluate_all(
            "(all) => all.every((one) => !one.checkVisibility())"
        )


async def test_the_heat_map_has_a_row_for_each_worker_and_a_shade_for_each_share(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, f"{dashboard.url}#hit-rate", **LAPTOP) as page:
        await until(page, "document.querySelectorAll('#prefixes tbody tr').length === 4", "four workers")
        first = page.locator("#prefixes tbody tr").first
        assert await first.inner_text() == "w0/0\t·\t25\t50\t75\t100\t·\t25\t50\t75\t100\t·\t25"
        shades = await first.locator("td").evaluate_all(
            "(all) => all.map((one) => getComputedStyle(one).backgroundColor)"
        )
        assert len(set(shades)) == 5
        assert await page.locator("#prefix-list li").count() == 12
        dashboard.send("prefixes", heat(64) | {"workers": 1_000})
        await until(page, "document.querySelectorAll('#prefixes tbody tr').length === 12", "the first twelve")
        await page.get_by_role("button", name="Show 52 more of 1,000 that hold some").click()
        await until(page, "document.querySelectorAll('#prefixes tbody tr').length === 64", "all that were sent")
        dashboard.send("prefixes", {"prefixes": [], "rows": [], "workers": 0, "missed": ""})
        await until(
            page, "/begin alike/.test(document.getElementById('prefixes-summary').textContent)", "nothing shared"
        )
        assert await page.locator("#prefixes th").count() == 0


async def test_a_timeline_has_a_track_for_each_attempt_and_its_steps_in_numbers(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, f"{dashboard.url}#requests", **LAPTOP) as page:
        moved = page.locator("#timelines li").first
        await moved.wait_for()
        assert await moved.locator(".track").count() == 2
        pieces = await moved.locator(".track >> nth=0 >> i").evaluate_all("(all) => all.map((one) => one.className)")
        assert pieces == ["lookup", "placement", "prefill", "decode"]
        await moved.locator(".toggle").focus()
        await page.keyboard.press("Enter")
        cells = [plain(one) for one in await moved.locator("tbody tr").all_inner_texts()]
        assert cells[0].split("\t") == ["w1/0", "1 ms", "1 ms", "98 ms", "300 ms", "600 ms", "1,600", "960", "50"]
        assert cells[1].startswith("w2/0")
        newer = [timeline(f"r-{index}", NOW + index, "w0/0") for index in range(3)]
        dashboard.send("requests", {"last": [*newer, timeline("moved-once", NOW, "w1/0", "w2/0")], "slowest": newer})
        await until(page, "document.querySelectorAll('#timelines li').length === 4", "the next ones")
        assert await page.locator("#timelines [aria-expanded=true]").count() == 1, "what was opened stays open"
        await page.get_by_role("button", name="Pause").last.click()
        dashboard.send("requests", {"last": [], "slowest": []})
        await page.get_by_role("button", name="Slowest").click()
        await until(page, "document.querySelectorAll('#timelines li').length === 3", "the slowest, as they were held")


async def test_every_control_of_the_pages_is_reached_by_keyboard_and_has_a_name(
    dashboard: ScriptedDashboard, chromium: Any
) -> None:
    async with opened(chromium, dashboard.url, **LAPTOP) as page:
        await until(page, "!document.getElementById('board').hidden", "the board")
        for _ in range(3):  # the skip link, the overview's, this one
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await until(page, "document.getElementById('board').dataset.page === 'hit-rate'", "the page")
        assert await page.get_attribute("nav a >> nth=1", "aria-current") == "page"
        for name in ("Hit rate", "Requests"):
            await follow(page, name)
            unnamed = await page.evaluate(
                "[...document.querySelectorAll('a, button, select, svg[role], [tabindex]:not([tabindex=\"-1\"])')]"
                ".filter((one) => one.checkVisibility())"
                ".filter((one) => one.tagName === 'SELECT' || !one.textContent.trim())"
                ".filter((one) => !one.getAttribute('aria-label'))"
                ".map((one) => one.outerHTML)"
            )
            assert unnamed == [], name
        await page.locator("a.skip").focus()
        await page.keyboard.press("Enter")
        await until(page, "document.activeElement.id === 'workers-title'", "the workers, on the page that has them")


async def test_hours_of_updates_leave_nothing_behind(dashboard: ScriptedDashboard, chromium: Any) -> None:
    async with opened(chromium, f"{dashboard.url}#requests", **LAPTOP) as page:
        await page.locator("#timelines li").first.wait_for()
        await page.locator("#timelines .toggle").first.click()

        async def nodes(first: int, last: int) -> int:
            for index in range(first, last):
                last_ones = [timeline(f"r-{index}-{each}", NOW + index, "w0/0") for each in range(16)]
                dashboard.send("requests", {"last": last_ones, "slowest": last_ones})
                dashboard.send("ladders", ladders(ladder(requests=index), LATER))
                dashboard.send("prefixes", heat(1 + index % 64))
            newest = f"document.querySelector('#timelines button.id')?.dataset.full === 'r-{last - 1}-0'"
            await until(page, newest, "the last update")
            session = await page.context.new_cdp_session(page)
            await session.send("HeapProfiler.collectGarbage")
            counts = await session.send("Memory.getDOMCounters")
            await session.detach()
            return int(counts["nodes"])

        before, after = await nodes(0, 100), await nodes(100, 292)
        assert after < 1.2 * before
