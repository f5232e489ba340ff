"""A headless Chromium, driven over its debugging pipe (Chrome DevTools Protocol) with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Debian's package `chromium`; None where no browser is installed."""

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
          "--no-first-run", "--disable-dev-shm-usage", "--disable-quic", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip
# Chromium reads commands from file descriptor 3 and answers on 4.
_LAUNCH = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A running Chromium; a context manager."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True)
        # Numbers above 4, so that neither is overwritten before it is copied.
        pipes = [os.pipe(), os.pipe()]
        (read_end, self._write), (self._read, write_end) = pipes
        ours = [os.dup(fd) if fd > 9 else _high(fd) for fd in (read_end, write_end)]
        command = [sys.executable, "-c", _LAUNCH, *map(str, ours), CHROMIUM, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}"],
            pass_fds=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (read_end, write_end, *ours):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer within 60 s")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise OSError("Chromium closed its pipe")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


def _high(fd: int) -> int:
    """A copy of the descriptor with a number of at least 10."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, 10)


class Page:
    """One tab."""

    def __init__(
        self, browser: Browser, path: Path, *, width: int = 1400, height: int = 900, fragment: str = ""
    ) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        self._call("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """The window's inner size, in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, value: str, feature: str = "color-scheme") -> None:
        """What the reader prefers: 'light' or 'dark'; 'reduce' or 'no-preference' of the feature 'reduced-motion'."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": f"prefers-{feature}", "value": value}])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still false after {seconds} s: {condition}; said: {self.complaints()}")
            time.sleep(0.03)

    def click(self, selector: str) -> None:
        """As a mouse does: scrolled into view, pressed at its middle."""
        place = self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            "it.scrollIntoView({block: 'center', behavior: 'instant'}); const b = it.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.drag(place, place)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse there, in CSS pixels from the window's corner."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: Sequence[float], end: Sequence[float]) -> None:
        """Presses the mouse at one point and lets go at another; at the same point it is a click."""
        mouse = {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **mouse)
        if tuple(start) != tuple(end):
            for part in (0.5, 1.0):
                x, y = (a + (b - a) * part for a, b in zip(start, end, strict=True))
                self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1, **mouse)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **mouse)

    def place(self, selector: str) -> list[float]:
        """Left, top, width and height of the element, in CSS pixels from the window's corner."""
        return self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )

    def press(self, key: str) -> None:
        """A key of that name ('Escape', 'Enter', 'Tab', 'ArrowDown', '+', ...)."""
        codes = {"Escape": 27, "Enter": 13, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "+": 187, "/": 191}
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", "+", "/") else {}
        self._call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **text
        )
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def write(self, selector: str, text: str) -> None:
        """Types into a field, after emptying it."""
        self.run(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.focus(); it.select(); }})()")
        self._call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Picks an option of a select element."""
        self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.value = {json.dumps(value)};"
            "it.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def text(self, selector: str) -> str:
        """What the element shows."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        """How many elements match."""
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        made = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(made["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and refusals by the content security policy."""
        self.run("0")
        found = []
        for event in self._events():
            detail = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(detail["exceptionDetails"].get("exception", detail).get("description", detail)))
                case "Runtime.consoleAPICalled" if detail["type"] in ("error", "warning", "assert"):
                    found.append(str(detail["args"]))
                case "Log.entryAdded" if detail["entry"]["level"] in ("error", "warning"):
                    found.append(detail["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        self.run("0")
        return [e["params"]["request"]["url"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
