"""`make screenshots`: the pictures in docs/images: the dashboard (empty, busy, an engine killed), `kvscout top`."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from support.browser import CHROMIUM, MISSING, browser
from support.gateway_stack import MODEL, fresh_prompt, running_stack

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
SECONDS = 330.0
"""Of traffic, so that the charts have something to show."""
WORKERS = 8
TERMINAL_COLUMNS = 100
LAPTOP: dict[str, Any] = {"viewport": {"width": 1360, "height": 850}, "device_scale_factor": 1.2}
PHONE: dict[str, Any] = {
    "viewport": {"width": 375, "height": 812},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
PICTURES: dict[str, dict[str, Any]] = {
    "laptop": LAPTOP | {"color_scheme": "light"},
    "laptop-dark": LAPTOP | {"color_scheme": "dark"},
    "phone": PHONE | {"color_scheme": "light"},
    "phone-dark": PHONE | {"color_scheme": "dark"},
}
"""Devices, by the end of a picture's name."""
OTHER_PAGES = {
    "hit-rate": ("laptop", "Hit rate"),
    "hit-rate-phone": ("phone-dark", "Hit rate"),
    "requests": ("laptop", "Requests"),
    "requests-phone": ("phone-dark", "Requests"),
}
"""Device and link, by the end of a picture's name."""


async def talk(url: str, draw: random.Random) -> None:
    """One conversation: a system prompt that others have, too, and a few turns."""
    prompt = [*SYSTEM_PROMPTS[draw.randrange(len(SYSTEM_PROMPTS))]]
    async with aiohttp.ClientSession() as http:
        for _ in range(draw.randint(2, 6)):
            prompt += [draw.randrange(32_000) for _ in range(draw.randint(64, 400))]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": draw.randint(40, 200), "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
            await asyncio.sleep(draw.expovariate(0.5))


async def converse(url: str, draw: random.Random) -> None:
    """More and more conversations."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(talk(url, draw))
            await asyncio.sleep(draw.expovariate(1.3))


ENCODE = """async (url) => {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/webp", 0.85);
}"""
SYSTEM_PROMPTS = [fresh_prompt(length).tolist() for length in (480, 640, 960, 1280, 1600, 800, 1120, 560)]


async def picture(chromium: Any, page: Any, name: str) -> None:
    """All of a page as it is now, as WebP: a third of a PNG."""
    # What is chosen is not where the pointer is, and the header is at the top.
    await page.mouse.move(1, 1)
    await page.evaluate("scrollTo(0, 0)")
    png = base64.b64encode(await page.screenshot(full_page=True)).decode()
    blank = await chromium.new_page()
    encoded: str = await blank.evaluate(ENCODE, f"data:image/png;base64,{png}")
    await blank.close()
    (IMAGES / f"dashboard-{name}.webp").write_bytes(base64.b64decode(encoded.partition(",")[2]))


async def until(page: Any, selector: str) -> None:
    """Waits for something to show."""
    await page.locator(selector).first.wait_for(timeout=60_000)


async def terminal_picture(gateway: str, name: str, *words: str) -> None:
    """What a command prints on a terminal, as SVG."""
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(TERMINAL_COLUMNS)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *words, "--gateway", gateway),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    printed, _ = await process.communicate()
    console = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(f"$ kvscout {' '.join(words)}\n{printed.decode()}"), soft_wrap=True)
    # Without the fonts, which rich would have the browser load from elsewhere.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
        "Fira Code", "DejaVu Sans Mono"
    )
    svg = console.export_svg(title=f"kvscout {words[0]}", code_format=form, unique_id=name)
    (IMAGES / f"{name}.svg").write_text(svg)


async def main(seconds: float) -> None:
    """Takes the pictures: before any request, after so many seconds of traffic, and with an engine that was killed."""
    draw = random.Random(7)
    mockers = [("--speedup", "1", "--num-gpu-blocks", "4095") for _ in range(WORKERS)]
    async with (
        running_stack("--port", "7050", "--http-port", "8000", mockers=mockers) as stack,
        browser("--disable-lcd-text") as chromium,
        asyncio.TaskGroup() as group,
    ):
        IMAGES.mkdir(exist_ok=True)
        url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}"
        pages = {name: await (await chromium.new_context(**kind)).new_page() for name, kind in PICTURES.items()}
        for page in pages.values():
            await page.goto(url)
        laptop = pages["laptop"]
        await until(laptop, "#doctor-line[data-kind=well]")
        await until(laptop, f"#workers tbody tr >> nth={WORKERS - 1}")
        await picture(chromium, laptop, "empty")
        traffic = group.create_task(converse(url, draw))
        await asyncio.sleep(seconds)
        await terminal_picture(stack.gateway.address, "top", "top", "--once", "--interval", "5")
        for name, page in pages.items():
            await picture(chromium, page, name)
        for name, (kind, shown) in OTHER_PAGES.items():
            page = pages[kind]
            await page.get_by_role("link", name=shown).click()
            if shown == "Requests":
                await page.locator("#timelines .toggle").nth(1).click()
            await picture(chromium, page, name)
        await laptop.get_by_role("link", name="Overview").click()
        stack.mockers[2].process.kill()
        await until(laptop, "#doctor-line[data-kind=error]")
        await until(laptop, "#workers .pill.error")
        await until(laptop, "#failures tbody tr")
        await laptop.get_by_role("button", name="Pause").click()
        await laptop.locator("#doctor summary").click()
        chosen = laptop.locator("#decisions li", has_text="which has more")
        if not await chosen.count():
            chosen = laptop.locator("#decisions li")
        await chosen.first.locator(".toggle").click()
        await picture(chromium, laptop, "broken")
        traffic.cancel()


if __name__ == "__main__":
    if not CHROMIUM:
        raise SystemExit(MISSING)
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
