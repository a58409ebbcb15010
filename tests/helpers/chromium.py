"""A headless Chromium, driven through its DevTools protocol over a pipe: no driver, no package.

Messages are JSON with a zero byte at their end, on the descriptors 3 (to the browser) and 4 (from it).
"""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


def find() -> str | None:
    """The browser's program; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. It collects what a test asks: errors of the console, exceptions, requests."""

    def __init__(self, to: int, of: int, timeout_s: float) -> None:
        self._to, self._of, self._timeout_s = to, of, timeout_s
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(
        self, path: Path, width: int, height: int = 900, *, dark: bool = False, scripts: bool = True
    ) -> None:
        """Loads a file on a screen of `width` pixels and waits until it has loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Presses and releases a key, such as ArrowLeft or Tab."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key]
            )

    def wait_for(self, event: str) -> None:
        """Reads on until the browser reports an event."""
        while self._read().get("method") != event:
            pass

    def _read(self) -> Any:
        end = time.monotonic() + self._timeout_s
        while b"\0" not in self._buffer:
            if not select.select([self._of], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no answer of the browser in {self._timeout_s} s")
            chunk = os.read(self._of, 65536)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        return message


@contextmanager
def browser(program: str, profile: Path, timeout_s: float = 60) -> Iterator[Page]:
    """A page in a new browser with the empty folder `profile`; the browser ends with the block."""
    for_browser, to = os.pipe()
    of, from_browser = os.pipe()
    # The browser expects 3 and 4, which may be other pipes here: a shell moves them.
    moved = f'exec 3<&{for_browser} 4>&{from_browser}; exec "$0" "$@"'
    command = ["bash", "-c", moved, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(for_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(for_browser)
    os.close(from_browser)
    try:
        yield Page(to, of, timeout_s)
    finally:
        os.close(to)  # a closed pipe ends the browser
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(of)
