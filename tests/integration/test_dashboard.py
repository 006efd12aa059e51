"""The dashboard in a real Chromium, of a real stack with some traffic."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.browser import CHROMIUM, MISSING, browser
from support.browser_page import POLL_SECONDS, opened, until
from support.free_ports import free_ports
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack
from support.processes import eventually, running

from kvscout.v1 import workers_pb2

playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not CHROMIUM, reason=MISSING),
]
HOSTILE = "<img src=x onerror=\"document.title='run'\">"
NOWHERE = "127.0.0.1:1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser() as started:
        yield started


def url_of(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.gateway.ready['http_port']}/"


async def test_before_the_first_request_there_is_a_command_that_works(stack: Stack, chromium: Any) -> None:
    async with opened(chromium, url_of(stack)) as page:
        await page.locator("#try").wait_for()
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        assert await page.locator("#charts, #decisions-section").first.is_hidden()
        command = await page.inner_text("#try-command")
        pasted = await asyncio.create_subprocess_shell(f"{command} --silent --fail", stdout=asyncio.subprocess.PIPE)
        answer, _ = await pasted.communicate()
        assert pasted.returncode == 0
        assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
        await page.locator("#charts").wait_for()
        assert await page.locator("#try").is_hidden()


async def test_it_shows_workers_decisions_with_candidates_and_rates_and_follows_them(
    stack: Stack, chromium: Any
) -> None:
    async with opened(chromium, url_of(stack)) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        await until(page, "document.querySelectorAll('#services tbody tr').length === 3", "three services")
        assert stack.gateway.address in (await page.locator("#services tbody").text_content() or "")
        await until(page, "document.getElementById('connection').dataset.state === 'live'", "it is live")
        prompt = fresh_prompt(256)
        await stack.client.generate(prompt, max_tokens=8)
        await stack.client.until_indexed(prompt, 16)

        async def decided() -> bool:
            await stack.client.generate(prompt, max_tokens=8, request_id="seen-by-a-browser")
            shown: int = await page.locator("#decisions li", has_text="16 of 16 blocks").count()
            if not shown:
                await asyncio.sleep(POLL_SECONDS)
            return shown > 0

        await eventually(decided, what="a decision is shown")
        await page.get_by_role("button", name="Pause").click()
        chosen = page.locator("#decisions li", has_text="16 of 16 blocks").first
        assert re.search(r"cost .* ms, as 25", await chosen.inner_text())
        assert (await chosen.locator("button.id").inner_text()) == "…-browser"
        await chosen.locator(".toggle").click()
        candidates = await chosen.locator("tbody tr").all_inner_texts()
        assert len(candidates) == 2
        assert candidates[0].startswith("✓ ")
        assert "seen-by-a-browser" in await chosen.locator(".detail").inner_text()
        await until(page, "document.querySelector('#plots .strip:nth-child(3) path')", "a point of TTFT")
        label = await page.locator("#plots svg").first.get_attribute("aria-label")
        assert label.startswith("Hit rate: cached ")
        # What was opened stays open while all of the page is told anew.
        seen = await page.inner_text("#connection")
        await until(page, f"document.getElementById('connection').textContent !== {seen!r}", "the next look")
        assert await page.locator("#decisions [aria-expanded=true]").count() == 1
        await until(page, r"/of [1-9]/.test(document.getElementById('savings').textContent)", "tokens that were saved")
        assert await page.locator("#try").is_hidden()
        await page.get_by_role("searchbox").fill("no such worker")
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 0", "nothing is found")
        await page.get_by_role("searchbox").fill("W1 mock")
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 1", "w1 is found")


async def test_the_pages_show_the_ladder_who_holds_a_prompt_and_the_steps_of_a_request(
    stack: Stack, chromium: Any
) -> None:
    prompt = fresh_prompt(1_024)
    for _ in range(3):
        await stack.client.generate(prompt, max_tokens=8, request_id="timed-by-a-browser")
        await stack.client.until_indexed(prompt, 64)
    async with opened(chromium, f"{url_of(stack)}#hit-rate") as page:
        await until(page, "document.querySelectorAll('#ladder .rung').length === 5", "five rungs")
        await until(page, "document.querySelectorAll('#prefixes .heat4').length > 0", "who holds the prompt")
        assert "1,024\u00a0tokens" in await page.inner_text("#prefix-list")
        await page.get_by_role("link", name="Requests").click()
        timed = page.locator("#timelines li", has=page.locator("[data-full=timed-by-a-browser]")).first
        await timed.locator(".toggle").click()
        _, began, *steps, tokens, cached, output = (await timed.locator("tbody tr").first.inner_text()).split("\t")
        assert (tokens, cached, output) == ("1,024", "1,008", "8")
        assert all(step[0].isdigit() for step in (began, *steps))


@pytest.mark.services_only
async def test_every_control_is_reached_by_keyboard_and_has_a_name(stack: Stack, chromium: Any) -> None:
    async with opened(chromium, url_of(stack)) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the workers"
        unnamed = await page.evaluate(
            "[...document.querySelectorAll('button, input, summary, [tabindex]:not([tabindex=\"-1\"])')]"
            ".filter((one) => one.checkVisibility())"
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
        await until(page, "document.getElementById('doctor-line').dataset.kind === 'error'", "a finding in one line")
        assert await page.locator("#findings").is_hidden()
        await page.locator("#doctor summary").click()
        assert len(await page.locator("#findings .remedy").first.inner_text()) > 10
        await until(page, "/^✕ /.test(document.querySelector('#workers .pill').textContent)", "which worker")
        assert (await page.inner_text("#workers tbody tr >> nth=0")).startswith("w1/0")
        assert "1 in trouble" in await page.inner_text("#workers-summary")


@pytest.mark.services_only
async def test_a_scheduler_that_is_gone_is_named_in_the_first_line(each_mode: None, chromium: Any) -> None:
    async with running_stack() as started, opened(chromium, url_of(started)) as page:
        await until(page, "document.querySelectorAll('#workers tbody tr').length === 2", "two workers")
        await until(page, "document.getElementById('doctor-line').dataset.kind === 'well'", "all is well")
        started.scheduler.process.kill()
        await started.client.generate(fresh_prompt(64), max_tokens=4)
        await until(page, "/^[✕▲]/.test(document.getElementById('doctor-line').textContent)", "it is missed")
        await until(page, "document.getElementById('services-summary').className === 'trouble'", "which service")
        assert started.scheduler.address in await page.inner_text("#services-summary")
        await until(page, "!document.getElementById('failures-section').hidden", "what was answered without it")
        assert "scheduler" in await page.inner_text("#failures tbody")


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
            assert "no data since" in await page.inner_text("#connection")
            assert re.match(r".*No data since \d\d:\d\d:\d\d from this gateway", await page.inner_text("#doctor-line"))
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
