"""A page in a browser: it must not fail, and what it shows is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.processes import DEADLINE_SECONDS, eventually

POLL_SECONDS = 0.2
"""Between two looks at a page: each costs more than what it looks at."""
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName) || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const front = light(rgba(node.closest("svg") ? style.fill : style.color)), back = light(behind(node));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < 4.5) bad.push(`${text}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
"""Gives the texts that stand out less than WCAG AA asks of small ones."""


@asynccontextmanager
async def opened(chromium: Any, url: str, **device: Any) -> AsyncIterator[Any]:
    """A page, none of whose scripts may fail, and which loads nothing from elsewhere."""
    context = await chromium.new_context(**device)
    context.set_default_timeout(1000 * DEADLINE_SECONDS)
    page = await context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    # A gateway that is gone is the page's to tell; that the browser tells it too is no failure.
    page.on(
        "console",
        lambda said: (
            errors.append(said.text)
            if said.type in ("error", "warning") and "Failed to load resource" not in said.text
            else None
        ),
    )
    own = (url.partition("#")[0], "data:")
    page.on("request", lambda asked: errors.append(asked.url) if not asked.url.startswith(own) else None)
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
