"""A headless Chromium for tests of pages: import `open_page` in a conftest.py and it is a fixture there.

`open_page(path, width=375, dark=True)` returns the page, opened from its file. Tests skip where Chromium or its driver
is absent (Debian: `apt install chromium chromium-driver`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PHONE, DESK = 375, 1280  # CSS pixels

OpenPage = Callable[..., "Page"]


@dataclass(frozen=True, slots=True)
class Page:
    """What is open in the browser."""

    driver: Any  # selenium's
    width: int  # of the screen

    def js(self, script: str, *arguments: Any) -> Any:
        """Return the value of a script's `return`."""
        return self.driver.execute_script(script, *arguments)

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the screen; on a phone the window grows with the page."""
        return int(self.js("return document.documentElement.scrollWidth")) - self.width

    def press(self, keys: str) -> None:
        """Press keys where the focus is; special ones are those of selenium.webdriver.Keys."""
        self.driver.switch_to.active_element.send_keys(keys)

    def messages(self) -> list[str]:
        """Return what the console got since the last call: errors and warnings."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the URLs asked for since the last call, the page's own among them."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = (event for event in events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path) -> Path:
        """Write a picture of the whole page."""
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))
        return path


@contextmanager
def _driver(profile: Path) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(driver, env={**os.environ, "SE_OFFLINE": "true", "SE_AVOID_STATS": "true"})
    started = webdriver.Chrome(options=options, service=service)
    started.set_page_load_timeout(60)
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture(scope="session")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    """Return a function that opens a file at a width and colour scheme."""
    with _driver(tmp_path_factory.mktemp("chromium")) as driver:

        def opened(path: Path, width: int = DESK, dark: bool = False, height: int = 900) -> Page:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width <= 480}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # no window is as narrow as a phone
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            driver.get("about:blank")
            page = Page(driver, width)
            page.messages()
            page.requests()
            driver.get(path.resolve().as_uri())
            return page

        yield opened
