"""`make screenshots`: the pictures of the dashboard in docs/images, of a stack that runs with some traffic."""

from __future__ import annotations

import asyncio
import base64
import random
import sys
from pathlib import Path
from typing import Any

import aiohttp
from support.browser import CHROMIUM, MISSING, browser
from support.gateway_stack import MODEL, fresh_prompt, running_stack

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
SECONDS = 330.0
"""Of traffic, so that the charts have something to show."""
WORKERS = 6
LAPTOP: dict[str, Any] = {
    "viewport": {"width": 1360, "height": 1730},
    "color_scheme": "light",
    "device_scale_factor": 1.2,
}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "color_scheme": "dark",
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}


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
SYSTEM_PROMPTS = [fresh_prompt(length).tolist() for length in (480, 960, 1600)]


async def picture(chromium: Any, page: Any, name: str) -> None:
    """What a page shows now, as WebP: a third of a PNG."""
    png = base64.b64encode(await page.screenshot()).decode()
    blank = await chromium.new_page()
    encoded: str = await blank.evaluate(ENCODE, f"data:image/png;base64,{png}")
    await blank.close()
    (IMAGES / f"{name}.webp").write_bytes(base64.b64decode(encoded.partition(",")[2]))


async def main(seconds: float) -> None:
    """Takes the pictures after so many seconds of traffic."""
    draw = random.Random(7)
    mockers = [("--speedup", "1", "--num-gpu-blocks", "2048") for _ in range(WORKERS)]
    async with (
        running_stack("--port", "7050", mockers=mockers) as stack,
        browser("--disable-lcd-text") as chromium,
        asyncio.TaskGroup() as group,
    ):
        url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}"
        laptop, phone = [await (await chromium.new_context(**kind)).new_page() for kind in (LAPTOP, PHONE)]
        for page in (laptop, phone):
            await page.goto(url)
        traffic = group.create_task(converse(url, draw))
        await asyncio.sleep(seconds)
        # Trouble is part of the picture.
        stack.mockers[2].process.kill()
        await laptop.locator("#doctor li").first.wait_for(timeout=60_000)
        await laptop.locator("#decisions summary").nth(1).click()
        # The chosen candidate is not where the pointer is.
        await laptop.mouse.move(5, 5)
        IMAGES.mkdir(exist_ok=True)
        await picture(chromium, laptop, "dashboard-laptop")
        await picture(chromium, phone, "dashboard-phone")
        await phone.evaluate("document.getElementById('workers-title').closest('.card').scrollIntoView()")
        await picture(chromium, phone, "dashboard-phone-workers")
        traffic.cancel()


if __name__ == "__main__":
    if not CHROMIUM:
        raise SystemExit(MISSING)
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
