"""With log.format = json each line on standard error is JSON, also those of Python itself and of libraries."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any, Final

import pytest

from ..daemon_process import Daemon, until

_BEFORE: Final = f"{__name__}:go_wrong_once_it_listens"


class Unruly:
    def __del__(self) -> None:
        raise RuntimeError("said by a finalizer\non two lines")


def go_wrong_once_it_listens(socket: str) -> None:
    """Runs in the daemon: a thread that has everything go wrong once the daemon serves, and then ends it."""

    def fail() -> None:
        raise RuntimeError("said by a thread\non two lines")

    def run() -> None:
        until(Path(socket).exists, "the daemon to listen")
        warnings.warn("said by a warning\non two lines", RuntimeWarning, stacklevel=1)
        logging.getLogger("some.library").warning("said by a %s\non two lines", "library")
        logging.getLogger("some.library").error("said with %d values", "other")
        asyncio.new_event_loop().call_exception_handler({"message": "said by asyncio"})
        Unruly()
        failing = threading.Thread(target=fail)
        failing.start()
        failing.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, daemon=True).start()


def lines_of(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.splitlines()]


def test_what_python_or_a_library_says_is_a_line_of_json_too() -> None:
    with Daemon(log_format="json") as daemon:
        daemon.before = _BEFORE, {"socket": str(daemon.status_socket)}
        assert daemon.spawn().wait(30.0) == 0, daemon.log
        lines = lines_of(daemon)
    said = "\n".join(f"{line['level']} {line['part']}: {line['event']} {line.get('exception')}" for line in lines)
    for by in ("a warning", "a library", "%d values", "asyncio", "a finalizer", "a thread"):
        assert by in said, said
    assert {line["where"] for line in lines if line.get("warning") == "RuntimeWarning"}


@pytest.mark.parametrize("flags", [{"ring_bytes": 1}, {"log_level": "loud"}, {"no_such_setting": 1}], ids=str)
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_refused_configuration_is_a_line_of_json(
    flags: dict[str, object], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(**flags) as daemon:
        if by == "flag":
            daemon.flags["log_format"] = "json"
        else:
            daemon.prefix = ["env", "TENSORD_LOG_FORMAT=json"]
        daemon.refused()
        (line,) = lines_of(daemon)
    (name,) = flags
    assert line["event"] == "cannot serve"
    assert name.replace("_", "") in line["why"].replace("_", "").replace(".", "").replace("-", "")
