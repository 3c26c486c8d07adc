"""A headless Chromium, driven through its debugging pipe: no driver, no port, no package.

The protocol is Chrome's own (https://chromedevtools.github.io/devtools-protocol): JSON that ends with a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.time_limits import limit_s

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no Chromium here: apt-get install chromium"
_FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
)
# what went wrong on a page, by the event that tells it
_ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")

# a page that is whole and sends on to no other, as the site's index does
_STAYS = "document.readyState === 'complete' && !document.querySelector('meta[http-equiv=refresh]')"


class Browser:
    """One page.

    Args:
        folder: for the browser's own files; empty.

    Attributes:
        errors: of the console and of scripts, and what was asked of a network.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        pipes = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._left, self._session = 0, b"", ""
        self.errors: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = ""
            self._ask("Browser.close")
            self._process.wait(limit_s(10))
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Load a file into a window of this width, in the light or the dark theme."""
        self.resize(width, dark=dark)
        self._ask("Page.navigate", url=page.as_uri())
        until = time.monotonic() + limit_s(60)
        while time.monotonic() < until:
            with suppress(AssertionError):  # a page that sends on to another goes while it is asked
                self.settle()
                if self.run(_STAYS):
                    return
        raise AssertionError(f"{page} does not stay loaded")

    def resize(self, width: int, *, dark: bool = False) -> None:
        """Give the window this width, and the page the light or the dark theme."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, or of what it promises."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of the first element, which is scrolled to."""
        script = f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "nearest"}});
            const box = found.getBoundingClientRect();
            return [box.x, box.y, box.width, box.height];
        }})()"""
        left, top, width, height = self.run(script)
        return left, top, width, height

    def click(self, selector: str) -> None:
        """Click on the middle of the first element."""
        left, top, width, height = self.place(selector)
        self.mouse("mouseMoved", left + width / 2, top + height / 2)
        self.mouse("mousePressed", left + width / 2, top + height / 2, button="left", clickCount=1)
        self.mouse("mouseReleased", left + width / 2, top + height / 2, button="left", clickCount=1)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Let the mouse do something."""
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._count, "method": method, "params": parameters} | session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self._hear(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _hear(self, event: dict[str, Any]) -> None:
        method, told = event.get("method", ""), event.get("params", {})
        complains = method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert")
        asks = method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(("file:", "data:"))
        if method in _ERRORS or complains or asks:
            self.errors.append(f"{method}: {told}")

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + limit_s(60)
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._from, 1 << 16) if ready else b""
            if not more:
                raise RuntimeError(f"Chromium ended or is silent (exit status {self._process.poll()})")
            self._left += more
        first, _, self._left = self._left.partition(b"\0")
        return json.loads(first)


def click_through(page: Path, folder: Path, then: Callable[[Browser], object] = lambda browser: None) -> list[str]:
    """Open a timeline's page on a laptop and a telephone, zoom, choose a task, and change the theme; then more.

    Args:
        then: what else is done with the page, on a laptop again.

    Returns:
        What the browser complained of.
    """
    with Browser(folder) as browser:
        for width in (1200, 400):
            browser.open(page, width)
            for selector in ("[data-zoom=in]", "[data-zoom=out]", "[data-zoom=whole]", "[data-span]", "#theme"):
                browser.click(selector)
            assert " ms, from " in browser.run("document.querySelector('output').textContent")
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.open(page, 1200)
        then(browser)
        return browser.errors
