"""The documentation as a site: its tabs, its boxes, and its search when it is opened from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import CHROMIUM, MISSING, browser
from support.processes import DEADLINE_SECONDS

pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason=MISSING)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)),
        check=False,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


@pytest.mark.parametrize("page", ["index.html", "services/gateway/index.html"])
async def test_search_works_in_a_site_that_is_opened_from_disk(site: Path, page: str) -> None:
    async with browser() as chromium:
        opened = await chromium.new_page(viewport={"width": 1600, "height": 900})
        opened.set_default_timeout(1000 * DEADLINE_SECONDS)
        errors: list[str] = []
        opened.on("pageerror", lambda error: errors.append(str(error)))
        fetched: list[str] = []
        opened.on("request", lambda request: fetched.append(request.url))
        await opened.goto((site / page).as_uri())
        await opened.locator("input.md-search__input").click()
        await opened.locator("input.md-search__input").press_sequentially("cool-down")
        result = opened.locator("a.md-search-result__link", has_text="Load, queueing and cool-downs").first
        await result.wait_for(state="visible")
        await result.click()
        await opened.wait_for_url("**/load-and-waiting.html**")
        assert errors == []
        assert [url for url in fetched if not url.startswith(("file:", "data:", "blob:"))] == []


async def test_a_page_has_four_tabs_and_begins_with_what_to_do(site: Path) -> None:
    async with browser() as chromium:
        opened = await chromium.new_page(viewport={"width": 1600, "height": 900})
        await opened.goto((site / "index.html").as_uri())
        tabs = await opened.locator("a.md-tabs__link").all_inner_texts()
        assert [each.strip() for each in tabs] == ["Get started", "Guides", "Reference", "Internals"]
        box = opened.locator("article h1 + .admonition.tip")
        assert await box.locator(".admonition-title").inner_text() == "Do this"
        assert "make demo" in await box.locator("pre").inner_text()
