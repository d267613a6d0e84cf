"""Headless Chromium, driven through chromedriver's own HTTP interface (W3C WebDriver)."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ABSENT = "" if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: chromium, chromium-driver)"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that W3C WebDriver gives references
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --no-proxy-server"
).split()
KEYS = {"Enter": "\ue007", "Escape": "\ue00c"}


class Browser:
    """One window with an empty profile in `folder`."""

    def __init__(self, folder: Path):
        assert CHROMIUM and DRIVER
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = subprocess.DEVNULL
        self._driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        try:
            self._session = f"/session/{self._begin(wanted)['sessionId']}"
        except BaseException:
            self._end()
            raise

    def _begin(self, wanted: dict) -> dict:
        deadline = time.monotonic() + 60
        while True:
            try:
                body = {"capabilities": {"alwaysMatch": wanted}}
                return self._value(self._http.post("/session", json=body))
            except httpx.ConnectError:
                assert time.monotonic() < deadline, "chromedriver does not come up"
                time.sleep(0.05)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        try:
            self._http.delete(self._session)
        finally:
            self._end()

    def _end(self) -> None:
        self._http.close()
        self._driver.terminate()
        self._driver.wait()

    @staticmethod
    def _value(answer: httpx.Response):
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def _post(self, path: str, **body):
        return self._value(self._http.post(self._session + path, json=body))

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str, *arguments):
        """Run a function body in the page and return its result."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def wait(self, script: str, seconds: float = 60):
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline, f"waited in vain for {script}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        found = self._find(selector)
        self._post(f"/element/{found}/clear")
        self._post(f"/element/{found}/value", text=text)

    def _find(self, selector: str) -> str:
        return self._post("/element", using="css selector", value=selector)[_ELEMENT]

    def press(self, name: str) -> None:
        """A key, to whatever has the focus."""
        steps = [{"type": kind, "value": KEYS[name]} for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    def requested(self) -> list[str]:
        """Every URL asked for since the last look, by the page or by anything in it."""
        events = [json.loads(entry["message"])["message"] for entry in self._logs("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Messages on the console since the last call: errors, refusals of the policy."""
        return [entry["message"] for entry in self._logs("browser") if entry["level"] != "INFO"]

    def _logs(self, kind: str) -> list[dict]:
        return self._post("/se/log", type=kind)
