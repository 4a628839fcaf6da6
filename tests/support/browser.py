"""A Chromium without a screen, driven by its debugging protocol over two pipes: no port, no further library.

The protocol: https://chromedevtools.github.io/devtools-protocol/, messages of JSON that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # we may be root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_LIMIT_S = 60


class Browser:
    """One page of a running Chromium."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._rest, self._number, self._session = to, answers, b"", 0, ""
        self.events: list[dict[str, Any]] = []
        """All events that came: console messages, exceptions, requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result. Raises RuntimeError if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT_S
        while (answer := self._receive(deadline)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer" if not ready else "the browser has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited. Raises RuntimeError where it throws."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true; AssertionError after a minute."""
        deadline = time.monotonic() + _LIMIT_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"it did not come true: {expression}"
            time.sleep(0.02)
        return value

    def open(self, page: Path) -> None:
        """Open a file."""
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int, *, touch: bool = False) -> None:
        """Give the page another size in pixels, as a telephone's or as a screen's."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def prefer(self, **features: str) -> None:
        """Set what the user prefers: ``prefer(prefers_color_scheme="dark")``."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press a key and let it go: "ArrowLeft", "+"."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=8 * shift, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=8 * shift)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Let the mouse do something: "mouseMoved", "mousePressed", "mouseReleased", "mouseWheel"."""
        pressing = {"button": "left", "clickCount": 1} if kind in {"mousePressed", "mouseReleased"} else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**pressing, **more})

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a picture of what is in view, or of the whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def complaints(self) -> list[str]:
        """Return what the page wrote to the console, threw, or could not load."""
        self.evaluate("1")  # what was on its way has come then
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [json.dumps(event) for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """Return the addresses of all that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a Chromium with an empty profile in `folder`; it and all its processes have ended at the end."""
    # Its ends must be its descriptors 3 and 4, which only a shell can arrange without code in the child.
    commands, to = os.pipe()
    answers, replies = os.pipe()
    script = f'exec chromium "$@" 3<&{commands} 4>&{replies}'
    argv = ["/bin/bash", "-c", script, "chromium", *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            pass_fds=(commands, replies),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
    os.close(commands)
    os.close(replies)
    try:
        yield Browser(to, answers)
    finally:
        os.close(to)
        os.close(answers)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
