"""A headless Chromium over its debugging pipe: pages from disk are asked and watched for errors and requests."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Browser:
    """One tab. ``errors`` are exceptions and console errors so far, ``requests`` the addresses asked for."""

    def __init__(self, profile: Path) -> None:
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]

        def three_and_four() -> None:  # the ends that Chromium talks through
            ends = os.dup(read), os.dup(write)
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)
                os.set_inheritable(number, True)  # also where the end has this number already

        self._process = subprocess.Popen(
            [BROWSER, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=three_and_four,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._number, self._buffer, self._session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page from disk and wait until it says that it is ready (``data-ready`` of its root)."""
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + 60
        while self.ask("location.href") == "about:blank" or not self.ask(
            "document.documentElement?.dataset.ready ?? ''"
        ):
            assert time.monotonic() < end, (self.errors, self.ask("document.body?.innerText.slice(0, 500)"))
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """The JSON-ready value of a JavaScript expression; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def problems(self) -> list[str]:
        """What keeps a reader with weak eyes or without a mouse from the page, a line each."""
        return self.ask(Path(__file__).with_name("readable.js").read_text(encoding="utf-8"))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "the browser does not answer"
            self._buffer += os.read(self._read, 1 << 20)
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
