"""A headless Chromium that is cut off from every network but this machine.

Source: Playwright, https://playwright.dev/python/, and the Chrome DevTools Protocol,
https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WINDOW = (1400, 1000)
NARROW = 600
POLL_S = 0.25
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


@functools.cache
def playwright() -> Any:
    """Start Playwright, once for all tests of a process; skip the test if it is not installed."""
    return pytest.importorskip("playwright.sync_api", reason="no Playwright here").sync_playwright().start()


class Browser:
    """A browser with one page, to be used as a context manager; without a browser, the test is skipped.

    The browser is the one that ATTNBENCH_CHROMIUM names, or the first of NAMES that is installed.
    """

    def __init__(self) -> None:
        program = os.environ.get("ATTNBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            pytest.skip("no Chromium here: install one (apt install chromium), or name it in ATTNBENCH_CHROMIUM")
        self.requests: list[str] = []
        """Every address that the page requested."""
        self.problems: list[str] = []
        """Exceptions of the page's scripts, and warnings and errors on the console."""
        self._browser = playwright().chromium.launch(executable_path=program, args=["--disable-gpu", OFFLINE])
        page = self._browser.new_page(no_viewport=True)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        self._session = page.context.new_cdp_session(page)
        self.resize(*WINDOW)

    def _note(self, message: Any) -> None:
        if message.type in {"warning", "error"}:
            self.problems.append(f"{message.text} {message.location['url']}".rstrip())

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return the answer."""
        return self._session.send(method, parameters)

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def resize(self, width: int, height: int) -> None:
        """Resize the page; a narrow one counts as a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < NARROW}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Prefer a "light" or a "dark" page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, as JSON."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = 60.0) -> Any:
        """Wait until the expression is true, and return its value; an element counts as true, an exception as false."""
        end = time.monotonic() + timeout_s
        kept = "it && typeof it === 'object' && !Array.isArray(it) ? true : it"  # an element cannot be sent
        value = f"(() => {{ try {{ const it = {script}; return {kept}; }} catch {{ return null; }} }})()"
        while not (found := self.run(value)):
            assert time.monotonic() < end, f"not within {timeout_s:g} s: {script}"
            time.sleep(POLL_S)
        return found

    def press(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def axe(self, options: str = "") -> dict[str, Any]:
        """Find problems for keyboards and screen readers. Source: axe-core, https://github.com/dequelabs/axe-core."""
        script = pytest.importorskip("axe_playwright_python.base", reason="no axe-core here").AXE_SCRIPT
        self.run(f"{script}; true")
        return self.run(f"axe.run({options}).then((found) => JSON.parse(JSON.stringify(found)))")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
