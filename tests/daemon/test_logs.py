from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import structlog

from tensord.daemon.process import logs


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


def test_a_console_line_is_key_value() -> None:
    stream = lines_of("console")
    logs.logger("store").info("put stored", bytes=5, name="a b")
    time, rest = stream.getvalue().split(" ", 1)
    assert datetime.fromisoformat(time.removeprefix("time=")).utcoffset() is not None
    assert rest == 'level=info part=store event="put stored" bytes=5 name="a b"\n'


def test_json_is_json_on_any_stream() -> None:
    stream = lines_of("json")
    logs.logger("store").warning("refused", key=b"\x01")
    (line,) = parsed(stream)
    assert (line["level"], line["part"], line["event"]) == ("warning", "store", "refused")
    assert line["time"].endswith("Z")


def test_a_line_that_cannot_be_written_is_lost_alone() -> None:
    with open("/dev/full", "w") as full:
        logs.setup("info", "console", {}, full)
        logs.logger("store").info("put stored")
        with suppress(OSError):
            full.close()


def test_a_line_is_one_line_and_has_no_character_that_a_terminal_obeys() -> None:
    for format_name in ("console", "json"):
        stream = lines_of(format_name)
        logs.logger("session").info("hello", name="a\nlevel=error \x1b]0;b\x07\x00\x9b\u202e ü", why=ValueError("\x1b"))
        line = stream.getvalue().removesuffix("\n")
        assert line.isprintable() and ("\\x1b" in line or "\\u001b" in line) and "\\u202e" in line


def test_an_exception_is_one_line_too() -> None:
    stream = lines_of("json")
    try:
        raise OSError("disc gone")
    except OSError:
        logs.logger("store").exception("failed")
    (line,) = parsed(stream)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("OSError: disc gone")


def test_the_level_can_be_changed_while_running() -> None:
    stream = lines_of("json")
    held = logs.logger("store")
    held.debug("one")
    logs.level("debug")
    held.debug("two")
    logs.level("error")
    held.warning("three")
    held.error("four")
    assert [line["event"] for line in parsed(stream)] == ["two", "four"]


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
