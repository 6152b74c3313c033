"""A real Chromium without a window for tests, driven by the DevTools protocol over a pair of pipes.

Owns: the process, its empty profile, and what its tabs said: errors, dialogs, refused resources. Does not own the
pages. Nothing is asked of any other host.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from typing import Any, Final, Self

import pytest

from .daemon_process import PATIENCE_S, until

PROGRAM: Final = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed: apt-get install chromium")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # /dev/shm is the daemons'
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_FAULTS: Final = (
    "Runtime.exceptionThrown",
    "Page.javascriptDialogOpening",
    "Log.entryAdded",
    "Runtime.consoleAPICalled",
)
# The protocol's pipes are descriptors 3 and 4 of the browser.
_EXEC: Final = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'


class Browser:
    """A browser with no tab yet. Use it in a `with`."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._read = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._told: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="tensord-browser-")
        theirs_in, self._orders = os.pipe()
        self._answered, theirs_out = os.pipe()
        flags = [*_FLAGS, f"--user-data-dir={self._folder}"]
        command = ["bash", "-c", _EXEC, "bash", str(theirs_in), str(theirs_out), PROGRAM, *flags, "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        return self

    def __exit__(self, *_: object) -> None:
        # The group that was started above: the browser and its own processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        os.close(self._orders)
        os.close(self._answered)
        until(lambda: not _removed(self._folder), "the end of the processes that use the profile")

    def open(self, url: str = "about:blank", width: int = 1280, height: int = 1000) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        if url != "about:blank":
            tab.go(url)
        return tab

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        order = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        _write(self._orders, json.dumps(order).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while number not in self._answers:
            ready, _, _ = select.select([self._answered], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer to {method} within {PATIENCE_S} s"
            self._take()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def faults(self, session: str) -> list[dict[str, Any]]:
        """Errors, warnings, dialogs and messages of a tab until now."""
        self.call("Runtime.evaluate", session, expression="0")
        return [each for each in self._told if each.get("sessionId") == session and each["method"] in _FAULTS]

    def _take(self) -> None:
        said = os.read(self._answered, 1 << 16)
        assert said, "the browser has ended"
        *messages, self._read = (self._read + said).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._told.append(message)


class Tab:
    """A tab of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        """Opens another page, and returns once it is loaded."""
        self.call("Page.navigate", url=url)
        until(lambda: self.run("location.href !== 'about:blank' && document.readyState === 'complete'"), "the page")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, what: str) -> None:
        until(lambda: self.run(f"Boolean({expression})"), what)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self) -> str:
        """The tab from top to bottom as PNG, in base64."""
        self.size(self.run("innerWidth"), self.run("document.documentElement.scrollHeight"))
        data: str = self.call("Page.captureScreenshot")["data"]
        return data

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Errors, warnings, dialogs and messages until now."""
        return self._browser.faults(self._session)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _removed(folder: str) -> bool:
    """Whether a folder is still there after removing it: processes that end may write into it."""
    shutil.rmtree(folder, ignore_errors=True)
    return os.path.exists(folder)
