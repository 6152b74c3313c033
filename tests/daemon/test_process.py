"""The daemon's process: its log, and threads that leave the processors to programs."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import structlog

from tensord.daemon.process import give_way, logs
from tensord.daemon.process.give_way import GivesWay
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire.frames import pack

from ..daemon_process import Daemon, until


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logs.level("info")


def lines_of(format_name: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.setup(level, format_name, {}, stream)
    return stream


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_console_line_is_key_value_and_json_is_json_on_any_stream() -> None:
    stream = lines_of("console")
    logs.logger("store").info("put stored", bytes=5, name="a b")
    time, rest = stream.getvalue().split(" ", 1)
    assert datetime.fromisoformat(time.removeprefix("time=")).utcoffset() is not None
    assert rest == 'level=info part=store event="put stored" bytes=5 name="a b"\n'
    stream = lines_of("json")
    logs.logger("store").warning("refused", key=b"\x01")
    try:
        raise OSError("disc gone")
    except OSError:
        logs.logger("store").exception("failed")
    line, failed = parsed(stream)
    assert (line["level"], line["part"], line["event"]) == ("warning", "store", "refused")
    assert line["time"].endswith("Z") and failed["level"] == "error"
    assert failed["exception"].startswith("Traceback") and failed["exception"].endswith("OSError: disc gone")


def test_a_line_is_one_line_and_has_no_character_that_a_terminal_obeys() -> None:
    for format_name in ("console", "json"):
        stream = lines_of(format_name)
        logs.logger("session").info("hello", name="a\nlevel=error \x1b]0;b\x07\x00\x9b\u202e ü", why=ValueError("\x1b"))
        line = stream.getvalue().removesuffix("\n")
        assert line.isprintable() and ("\\x1b" in line or "\\u001b" in line) and "\\u202e" in line


def test_the_level_can_be_changed_while_running() -> None:
    stream = lines_of("json")
    held = logs.logger("store")
    logs.level("error")
    held.warning("one")
    held.error("two")
    logs.level("warning")
    held.warning("three")
    assert [line["event"] for line in parsed(stream)] == ["two", "three"]


def test_json_is_chosen_only_for_the_journals_own_stream(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as stream, (tmp_path / "other").open("w+") as other:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert logs.to_journal(environ, stream)
        assert not logs.to_journal(environ, other)
        assert not logs.to_journal({}, stream)
        assert not logs.to_journal(environ, io.StringIO())
        for into in (stream, other):
            logs.setup("info", "auto", environ, into)
            logs.logger("store").info("x")
            into.seek(0)
        # The journal reads the priority, and removes it.
        assert stream.read().startswith("<6>{")
        assert other.read().startswith("time=")
        logs.setup("info", "json", environ, stream)
        logs.logger("store").error("y")
        stream.seek(0)
        assert stream.read().splitlines()[-1].startswith("<3>{")


def said_to(path: str, words: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(path)
        if words:  # a daemon that turns somebody away may have hung up by now
            visitor.sendall(words)
        answered = b""
        while more := visitor.recv(1 << 16):
            answered += more
        return answered


def test_a_client_of_another_version_that_tries_again_and_again_is_logged_once(daemon: Daemon) -> None:
    for _ in range(5):
        hello = pack(messages.Hello(1, PROTOCOL_VERSION + 1, "old", 1, True))
        assert b"VersionMismatch" in said_to(str(daemon.socket), hello)
    # Another reason is another line, and comes after all of those.
    said_to(str(daemon.socket), b"GET / HTTP/1.1")
    until(lambda: daemon.log.count("protocol error;") > 1, "the line of the other reason")
    assert daemon.log.count("protocol error;") == 2
    assert daemon.log.count("protocol version") == 1


# ---- processors


class Rests(threading.Event):
    """An event that is waited for in no time, and has the times."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


def test_a_thread_that_had_to_wait_for_a_processor_rests_before_it_works_again_unless_it_is_hurried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests = Rests()
    gives_way = GivesWay(rests)
    assert give_way._waited_s() >= 0, "what the kernel counts"

    def rested() -> bool:
        with gives_way.working(hurried=True):
            time.sleep(0.02)
        assert not rests.seconds
        with gives_way.working(hurried=False):
            return bool(rests.seconds)

    monkeypatch.setattr(give_way, "_waited_s", lambda: 0.0)
    assert not rested()
    monkeypatch.setattr(give_way, "_waited_s", time.monotonic)
    until(rested, "what was worked in a hurry counts afterwards")
    assert 0 < rests.seconds[0] <= give_way.REST_S_MOST
