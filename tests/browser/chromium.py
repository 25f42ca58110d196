"""A headless Chromium that is cut off from every network but this machine, driven through a pipe.

Source: the Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WINDOW = (1400, 1000)
NARROW = 600
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.25


def find() -> str | None:
    """Find the browser of the variable ATTNBENCH_CHROMIUM, or the first installed one of NAMES."""
    return os.environ.get("ATTNBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. Use it as a context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        self._number = 0
        self._rest = b""
        self.requests: list[str] = []
        """Every address that the page requested."""
        self.problems: list[str] = []
        """Exceptions of the page's scripts, and warnings and errors on the console."""
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"--window-size={WINDOW[0]},{WINDOW[1]}",
            "--remote-debugging-pipe",  # on descriptors 3 and 4
            "about:blank",
        ]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(theirs, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(answers)
        self._session = ""
        (page,) = [each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(*WINDOW)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return the answer; events received meanwhile are recorded."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            reported = self._next()
            if reported.get("id") == self._number:
                assert "error" not in reported, f"{method}: {reported['error']}"
                return reported["result"]
            self._note(reported)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], ANSWER_TIMEOUT_S)[0], "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _note(self, reported: dict[str, Any]) -> None:
        if reported.get("method") == "Network.requestWillBeSent":
            self.requests.append(reported["params"]["request"]["url"])
        if reported.get("method") == "Runtime.exceptionThrown":
            details = reported["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        if reported.get("method") == "Runtime.consoleAPICalled" and reported["params"]["type"] in {"warning", "error"}:
            self.problems.append(str([each.get("value") for each in reported["params"]["args"]]))
        if reported.get("method") == "Log.entryAdded" and reported["params"]["entry"]["level"] in {"warning", "error"}:
            entry = reported["params"]["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}".rstrip())

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
        """Wait until the expression is true, and return it; an element counts as true, an exception as not yet."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
