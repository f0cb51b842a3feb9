"""A headless Chromium, driven over its DevTools protocol through a pipe: no driver and no package beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 60.0


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Browser:
    """One page of a Chromium. `errors` are its console's, `requests` what it has asked for besides itself."""

    def __init__(self, folder: Path) -> None:
        browser = find_browser()
        assert browser is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._session, self._rest = 0, "", b""

        def connect() -> None:  # Chromium reads from 3 and writes to 4
            os.dup2(theirs_in, 13)
            os.dup2(theirs_out, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        words = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(  # it gets the two pipes as the numbers that it expects
            words, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol. Returns its result; what happens meanwhile is noted."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium did not answer"
            more = os.read(self._from, 1 << 16)
            assert more, "Chromium has ended"
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, **features: str) -> None:
        """Such as prefers_color_scheme='dark'."""
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def open(self, path: Path, hash: str = "") -> None:
        """Show a file, and wait until the player says that it is there."""
        self.call("Page.navigate", url="about:blank")
        self.requests.clear()
        self.call("Page.navigate", url=f"{path.as_uri()}#{hash}")
        deadline = time.monotonic() + TIMEOUT_S
        while self.eval("document.documentElement?.dataset.ready") != "true":
            assert time.monotonic() < deadline, f"the player did not start: {self.errors}"

    def eval(self, expression: str) -> Any:
        """The value of an expression, as JSON."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press a key, such as 'ArrowRight', ' ' or 'g'."""
        text = name if len(name) == 1 else ""
        more = {"key": name, "text": text, "modifiers": 8 if shift else 0}
        if name == "Enter":
            more |= {"text": "\r", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        self._process.wait(timeout=30)
