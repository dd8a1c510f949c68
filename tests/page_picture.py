"""Takes the README's picture of the page: SmolLM2 with ngram drafts, two other clients, a chat in the playground.

python tests/page_picture.py [docs/page.png] [--dark] [--width 1400] [--height 1640]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from conftest import chromium  # opens the device before anything imports mlx
from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import pipeline
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

COPY = (
    "Repeat this text word for word: A headrace is the channel that feeds a mill's wheel. The headrace feeds the mill, "
    "and the mill grinds the corn. A tailrace leads the water back to the river."
)
OTHERS = (
    "Write a poem of six lines about a river.", "Explain how a water wheel works.", "Name ten rivers, one a line.",
)  # fmt: skip
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["river", "country"],
    "properties": {key: {"type": "string", "maxLength": 20} for key in ("river", "country")},
}  # fmt: skip
PATIENCE_S = 90
COLOURS = 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", default="docs/page.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1640)
    args = parser.parse_args()
    recipe = ("smollm2", "drafter=ngram", "depth.max=8")
    with (
        pipeline.load(*recipe) as engine,
        serve_in_thread(engine, ServerSettings(shutdown_s=1)) as base,
        chromium() as browser,
        clients(base),
    ):
        look(browser, args.width, args.height, "dark" if args.dark else "light")
        browser.get(base + "/")
        chat(browser)
        picture = Image.open(BytesIO(browser.get_screenshot_as_png()))
        picture.quantize(COLOURS).save(args.file, optimize=True)
        browser.get("about:blank")


def look(browser: Any, width: int, height: int, scheme: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})


def chat(browser: Any) -> None:
    """An answer that is copied, and one of a form."""
    time.sleep(12)  # the charts have something to show
    say(browser, COPY, temperature="0")
    say(browser, "Tell me about one river.", form="JSON of", source=json.dumps(SCHEMA))
    browser.execute_script("document.querySelector('#sampling').open = false; scrollTo(0, 0)")
    browser.execute_script("document.activeElement.blur()")
    time.sleep(2)


def say(browser: Any, words: str, **controls: str) -> None:
    browser.execute_script("document.querySelector('#sampling').open = true")
    for name, value in controls.items():
        browser.find_element(By.ID, f"f-{name}").send_keys(value)
    browser.find_element(By.ID, "words").send_keys(words, Keys.ENTER)
    until = time.monotonic() + PATIENCE_S
    time.sleep(0.5)
    while browser.find_element(By.ID, "stop").is_displayed():
        assert time.monotonic() < until, "no answer"
        time.sleep(0.2)


@contextmanager
def clients(base: str) -> Iterator[None]:
    """Two that chat all the time."""
    over = threading.Event()
    threads = [threading.Thread(target=keep_asking, args=(base, n, over)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def keep_asking(base: str, number: int, over: threading.Event) -> None:
    turn = number
    while not over.is_set():
        words = OTHERS[turn % len(OTHERS)]
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 120, "seed": turn}
        connection = HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        connection.getresponse().read()
        connection.close()
        turn += 1


if __name__ == "__main__":
    main()
