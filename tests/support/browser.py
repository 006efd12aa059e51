"""A real Chromium without a window, as Debian has it (`apt-get install chromium`); driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
"""\"\" = there is none on this machine."""
MISSING = "there is no Chromium: apt-get install chromium"


@asynccontextmanager
async def browser(*further: str) -> AsyncIterator[Browser]:
    """A browser that has just been started, with these flags."""
    # Chromium does not sandbox itself for root, who is whom containers run tests as; /dev/shm is small there.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else []), *further]
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield started
        finally:
            await started.close()
