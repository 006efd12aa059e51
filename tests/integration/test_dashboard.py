"""The dashboard in a real Chromium, of a real stack with some traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.browser import CHROMIUM, MISSING, browser
from support.free_ports import free_ports
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack
from support.processes import DEADLINE_SECONDS, eventually, running

from kvscout.v1 import workers_pb2

playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not CHROMIUM, reason=MISSING),
]
HOSTILE = "<img src=x onerror=\"document.title='run'\">"
NOWHERE = "127.0.0.1:1"
POLL_SECONDS = 0.2
"""Between two looks at a page: each costs more than what it looks at."""
MS = 1000 * DEADLINE_SECONDS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as started:
        yield started


@asynccontextmanager
async def opened(chromium: Any, url: str, **device: Any) -> AsyncIterator[Any]:
    """A page, none of whose scripts may fail."""
    context = await chromium.new_context(**device)
    context.set_default_timeout(MS)
    page = await context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
    await page.goto(url)
    try:
        yield page
        assert not errors
    finally:
        await context.close()


async def until(page: Any, expression: str, what: str) -> None:
    """Waits until an expression is true in the page, whose policy lets nobody wait there."""

    async def is_true() -> bool:
        if await page.evaluate(expression):
            return True
        await asyncio.sleep(POLL_SECONDS)
        return False

    try:
        await eventually(is_true, what=what)
    except AssertionError as error:
        raise AssertionError(f"{error}; the page has:\n{await page.inner_text('body')}") from None


def url_of(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.gateway.ready['http_port']}/"


async def test_it_shows_workers_decisions_with_candidates_and_rates_and_follows_them(
    stack: Stack, chromium: Any
) -> None:
    async with opened(chromium, url_of(stack)) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        await until(page, "document.querySelectorAll('#services tbody tr').length === 3", "three services")
        await until(page, "document.getElementById('connection').dataset.state === 'live'", "it is live")
        prompt = fresh_prompt(256)
        await stack.client.generate(prompt, max_tokens=8)
        await stack.client.until_indexed(prompt, 16)

        async def decided() -> bool:
            await stack.client.generate(prompt, max_tokens=8, request_id="seen-by-a-browser")
            shown: int = await page.locator("#decisions summary", has_text="16 of 16 blocks cached").count()
            if not shown:
                await asyncio.sleep(POLL_SECONDS)
            return shown > 0

        await eventually(decided, what="a decision is shown")
        await page.get_by_role("button", name="Hold").click()
        chosen = page.locator("#decisions summary", has_text="16 of 16 blocks cached").first
        assert "seen-by-a-browser" in await chosen.inner_text()
        await chosen.click()
        detail = page.locator("#decisions details[open]").first
        candidates = await detail.locator("tbody tr").all_inner_texts()
        assert len(candidates) == 2
        assert candidates[0].startswith("✓ ")
        await until(page, "document.querySelector('#chart-ttft .dot, #chart-ttft path')", "a point of TTFT")
        label = await page.locator("#chart-hit svg").get_attribute("aria-label")
        assert label.startswith("Hit rate: ")
        # What was opened stays open while all of the page is told anew.
        seen = await page.inner_text("#connection")
        await until(page, f"document.getElementById('connection').textContent !== {seen!r}", "the next look")
        assert await page.locator("#decisions details[open]").count() == 1
        assert " 0 in all" not in await page.inner_text("#totals")
        await page.get_by_role("searchbox").fill("no such worker")
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 0", "nothing is found")
        await page.get_by_role("searchbox").fill("W1 mock")
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 1", "w1 is found")


@pytest.mark.services_only
async def test_on_a_phone_nothing_is_wider_than_the_screen_and_dark_is_dark(stack: Stack, chromium: Any) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True, "has_touch": True}
    async with opened(chromium, url_of(stack), **phone) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        for selector in ("#workers td", "#totals dd", "#services td"):
            right = await page.locator(selector).evaluate_all(
                "all => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
            )
            assert right <= 360, selector
        dark, light = [await _brightness(page, await _emulated(page, scheme)) for scheme in ("dark", "light")]
        assert (dark < 60, light > 200) == (True, True)


async def _emulated(page: Any, scheme: str) -> Any:
    await page.emulate_media(color_scheme=scheme)
    return await page.evaluate("getComputedStyle(document.body).backgroundColor")


async def _brightness(page: Any, colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


@pytest.mark.services_only
async def test_every_control_is_reached_by_keyboard_and_has_a_name(stack: Stack, chromium: Any) -> None:
    async with opened(chromium, url_of(stack)) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the workers"
        unnamed = await page.evaluate(
            "[...document.querySelectorAll('button, input, svg[tabindex]')]"
            ".filter((one) => !(one.textContent.trim() || one.labels?.length || one.getAttribute('aria-label')))"
            ".map((one) => one.outerHTML)"
        )
        assert unnamed == []
        heading = page.locator("#workers th").nth(2)
        await heading.locator("button").focus()
        await page.keyboard.press("Enter")
        assert await heading.get_attribute("aria-sort") == "descending"


@pytest.mark.services_only
async def test_what_a_worker_calls_itself_is_text(stack: Stack, chromium: Any) -> None:
    worker = workers_pb2.Worker(worker_id=HOSTILE, model=f"{MODEL}-x", block_size=16)
    await stack.client.register(worker, lease_seconds=60)
    async with opened(chromium, url_of(stack)) as page:
        await page.get_by_text(HOSTILE, exact=False).first.wait_for()
        assert await page.locator("img").count() == 0
        assert await page.title() == "kvscout"


async def test_trouble_shows_with_its_reason_and_remedy(stack: Stack, chromium: Any) -> None:
    stack.mockers[1].process.kill()
    async with opened(chromium, url_of(stack)) as page:
        await until(page, "document.querySelector('#doctor .remedy')?.textContent.length > 10", "a finding")
        await until(page, "document.getElementById('totals').textContent.includes('in trouble')", "trouble")
        await until(page, "document.querySelector('#workers .trouble')?.textContent === '▲ disconnected'", "which")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.touch(mode=0o600)
    path.write_text(
        'tokens:\n  - {token: boss, role: admin, tenant: "*"}\n  - {token: program, role: client, tenant: "*"}\n'
    )
    return path


async def test_a_token_is_asked_for_kept_in_the_tab_and_a_gateway_that_comes_back_is_found_again(
    chromium: Any, tokens: Path
) -> None:
    [port] = free_ports(1)
    flags = ("--no-indexer", "--scheduler", NOWHERE, "--auth-tokens", str(tokens), "--http-port", str(port))

    def gateway() -> Any:
        return running("kvscout_gateway.main", *flags)

    async with gateway() as first:
        async with opened(chromium, f"http://127.0.0.1:{port}/") as page:
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            await _sign_in(page, "wrong", "unknown token")
            await _sign_in(page, "program", "does not allow")
            await page.locator("#token").fill("boss")
            await page.get_by_role("button", name="Show").click()
            await until(page, "!document.getElementById('board').hidden", "the board")
            assert await page.locator("#sign-in").is_hidden()
            await page.reload()
            await until(page, "!document.getElementById('board').hidden", "the board, without a question")
            assert await first.stop() == 0
            await until(page, "document.getElementById('connection').dataset.state === 'lost'", "it is lost")
            assert "no gateway since" in await page.inner_text("#connection")
            async with gateway():
                await until(page, "document.getElementById('connection').dataset.state === 'live'", "it is back")
                await page.get_by_role("button", name="Forget the token").click()
                await page.locator("#token").wait_for()
                assert await page.evaluate("sessionStorage.length") == 0
            assert not [url for url in requested if "boss" in url]
            assert await page.context.cookies() == []


async def _sign_in(page: Any, token: str, refusal: str) -> None:
    await page.locator("#token").fill(token)
    await page.get_by_role("button", name="Show").click()
    await until(page, f"document.getElementById('sign-in-why').textContent.includes({refusal!r})", refusal)
