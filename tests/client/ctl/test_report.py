"""A report has what an issue needs, and nothing that tells of the site."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path

import pytest

from tensord.client.ctl import report
from tensord.client.ctl.doctor import facts
from tensord.client.ctl.redaction import Redaction

from ...daemon_process import Daemon
from .conftest import Ctl

KEY = bytes(range(32))
PARTS = ("versions", "doctor", "status", "health", "clients", "configuration", "log")


def test_a_report_says_what_it_contains_and_then_its_path(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    daemon.client(name="encoder-1").put(KEY, 1, wait=True)
    path = tmp_path / "report.txt"
    told = ctl("report", "--output", str(path)).out
    assert told.index("Keys and digests") < told.index(f"written: {path}")
    text = path.read_text()
    assert [line.removeprefix("==== ") for line in text.splitlines() if line.startswith("==== ")] == list(PARTS)
    assert "encoder-1" in text
    assert '"ring_bytes": 16777216' in text
    assert "flag --ring-bytes" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_report_has_no_key_host_user_or_home(
    daemon: Daemon, ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, host = "/srv/people/ada", "db7.example.org"
    ada = pwd.struct_passwd(("ada", "x", 1815, 1815, "", home, "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [pwd.getpwuid(0), ada])
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    lines = [
        f"{host} tensord[1]: key {KEY.hex()} of ada in {home}/x, again {KEY.hex()}, /home/bob/y on db7 at 10.1.2.3"
    ]
    monkeypatch.setattr(facts, "journal", lambda _: lines)
    path = tmp_path / "report.txt"
    ctl("report", "--output", str(path))
    text = path.read_text()
    for told in (KEY.hex(), host, "db7", "ada", "bob", home, "10.1.2.3"):
        assert told not in text, told
    assert "<host> tensord[1]: key <digest " in text
    assert "of <user> in <home>/x" in text and "<home>/y on <host> at <address>" in text
    assert text.partition("key <digest ")[2].partition(">")[0] == text.partition("again <digest ")[2].partition(">")[0]


def test_a_report_without_a_daemon_has_the_rest_and_the_reason(alone: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    alone("report", "--output", str(path))
    text = path.read_text()
    assert text.count("not available: DaemonUnavailable") == 4
    assert "FAIL  daemon (status)" in text


def test_an_existing_file_is_not_replaced(alone: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("mine")
    told = alone("report", "--output", str(path), code=1)
    assert "File exists" in told.err
    assert path.read_text() == "mine"


def test_the_file_is_named_by_the_time_without_a_name(
    alone: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = alone("report").out
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("tensord-report-2") and told.endswith(f"written: {path}\n")


def test_words_that_only_contain_a_name_stay() -> None:
    redacted = Redaction(["gpu"], ["put"], ["/srv/put"])
    assert redacted("putting a put on gpu-2 and gpu, 12.5 MiB, 127.0.0.1") == (
        "putting a <user> on gpu-2 and <host>, 12.5 MiB, 127.0.0.1"
    )
    for figures in ("epoch 123456789012 version 0.1.0", "share 0.30000000000000004"):
        assert redacted(figures) == figures


def test_the_site_s_own_names_are_replaced() -> None:
    assert report.site()(f"on {socket.gethostname()} in {os.environ.get('HOME', '/root')}/x").startswith(
        "on <host> in <home>/x"
    )
