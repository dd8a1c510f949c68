"""What must happen before any test module is imported, and fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

import pytest

from stages.device import Device

Device().open()  # the fast BLAS has to be there before any test imports mlx


@contextmanager
def chromium() -> Iterator[Any]:
    """Headless Chromium, which keeps what its console says."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium") or which("google-chrome")
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver
