"""A real Chromium without a screen, driven by chromedriver in W3C WebDriver's own words: no library, no network."""

import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.nodes.ports import reserved_port

CHROMIUM: Final = shutil.which("chromium") or ""
DRIVER: Final = shutil.which("chromedriver") or ""
MISSING: Final = "" if CHROMIUM and DRIVER else "needs Debian's packages chromium and chromium-driver"
"""Why tests with a browser cannot run here."""

WAIT_S: Final = 60.0
KEYS: Final = {"tab": "\ue004", "enter": "\ue007", "escape": "\ue00c", "left": "\ue012", "right": "\ue014"}


class Browser:
    """One window."""

    def __init__(self, port: int, dark: bool = True) -> None:
        self._port = port
        options = {
            "binary": CHROMIUM,
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-component-update", "--disable-background-networking",
                "--force-color-profile=srgb", "--hide-scrollbars",
            ],
        }  # fmt: skip
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{made['sessionId']}"
        self.scheme("dark" if dark else "light")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            data = None if method == "GET" else json.dumps(body or {})
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{value['error']}: {value['message'].splitlines()[0]}")
        return value

    def do(self, method: str, path: str, body: Any = None) -> Any:
        """A command of this session."""
        return self._call(method, self._session + path, body)

    def close(self) -> None:
        self.do("DELETE", "")

    # --- what a person does

    def open(self, url: str) -> None:
        self.do("POST", "/url", {"url": url})

    def back(self) -> None:
        """Not by a script: the driver runs one a second time if its page goes before it has answered."""
        self.do("POST", "/back")

    def reload(self) -> None:
        self.do("POST", "/refresh")

    def press(self, *keys: str) -> None:
        """Keys by their names in KEYS, or text."""
        said = [each for key in keys for each in ([KEYS[key]] if key in KEYS else key)]
        strokes = [{"type": kind, "value": each} for each in said for kind in ("keyDown", "keyUp")]
        self.do("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def click(self, selector: str) -> None:
        found = self.do("POST", "/element", {"using": "css selector", "value": selector})
        self.do("POST", f"/element/{next(iter(found.values()))}/click")

    def scheme(self, word: str) -> None:
        """What the person's system prefers: dark or light."""
        feature = [{"name": "prefers-color-scheme", "value": word}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": feature}}
        self.do("POST", "/goog/cdp/execute", command)

    # --- what a person sees

    def run(self, script: str, *arguments: Any) -> Any:
        """JavaScript, which returns something."""
        return self.do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str = "body") -> str:
        said: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return said

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
        """For what the page shows when it has heard of it."""
        end_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end_s, f"waited for {what}; the page says:\n{self.text()}\n{self.console()}"
            time.sleep(0.05)

    def console(self) -> list[str]:
        """What the console has said since the last time, warnings and errors."""
        entries = self.do("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> set[str]:
        """All addresses that were asked for since the last time."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.do("POST", "/se/log", {"type": "performance"})
        ]
        return {
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        }

    def wide(self, width: int, height: int) -> None:
        """The window as a telephone's; 0 and 0: as it was."""
        what = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": bool(width)}
        self.do("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": what})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.do("GET", "/screenshot")))


@contextlib.contextmanager
def running_browser(dark: bool = True) -> Iterator[Browser]:
    """With its driver; both have ended afterwards, and nothing of theirs is left."""
    with _directory() as directory, reserved_port() as held:
        port = int(held.getsockname()[1])
        environment = {"HOME": directory, "TMPDIR": directory, "PATH": "/usr/bin:/bin"}
        command = [DRIVER, f"--port={port}", "--log-level=SEVERE"]
        driver = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            browser = _connected(driver, port, dark)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(60)


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Of the browser's own; its processes may write there for a moment after their session has ended."""
    directory = tempfile.mkdtemp(prefix="dm")
    try:
        yield directory
    finally:
        end_s = time.monotonic() + WAIT_S
        while Path(directory).exists():
            shutil.rmtree(directory, ignore_errors=True)
            assert time.monotonic() < end_s, f"{directory} is still written to"


def _connected(driver: "subprocess.Popen[bytes]", port: int, dark: bool) -> Browser:
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return Browser(port, dark)
        except OSError:
            assert driver.poll() is None, f"chromedriver exited with {driver.returncode}"
            assert time.monotonic() < end_s, "chromedriver does not listen"
            time.sleep(0.05)
