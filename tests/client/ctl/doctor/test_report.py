"""A report has what an issue needs, and nothing that tells of the site."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path

import pytest

from tensord.client.ctl.doctor import facts, report
from tensord.client.ctl.doctor.redaction import Redaction

from ....daemon_process import Daemon
from ..conftest import Ctl

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


def test_an_existing_file_is_not_replaced_and_without_a_name_it_is_named_by_the_time(
    alone: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.txt"
    path.write_text("mine")
    assert "File exists" in alone("report", "--output", str(path), code=1).err
    assert path.read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    told = alone("report").out
    (made,) = tmp_path.glob("tensord-report-2*")
    assert told.endswith(f"written: {made}\n")


def test_words_that_only_contain_a_name_stay() -> None:
    redacted = Redaction(["gpu"], ["put"], ["/srv/put"])
    assert redacted("putting a put on gpu-2 and gpu, 12.5 MiB, 127.0.0.1") == (
        "putting a <user> on gpu-2 and <host>, 12.5 MiB, 127.0.0.1"
    )
    for figures in ("epoch 123456789012 version 0.1.0", "share 0.30000000000000004"):
        assert redacted(figures) == figures


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("from 10.1.2.3.", "from <address>."),
        ("at [2001:db8::7]:6379 and fe80::1%eth0: no route", "at [<address>]:6379 and <address>: no route"),
        ("to ::ffff:10.1.2.3, fe80::", "to <address>, <address>"),
        ("db7.lan:8000, DB7.example.org", "<host>:8000, <host>"),
        ("db7.", "<host>."),
        ("db7.room_s_max", "<host>.room_s_max"),
        ("ollama gpu9.corp.example:11434 refused", "ollama <host>:11434 refused"),
        ("valkeys://ada:***@db7:6379/0?expiry=1h", "valkeys://<user>@<host>:6379/0?expiry=1h"),
    ],
)
def test_every_form_of_a_host_or_an_address_is_replaced(told: str, shown: str) -> None:
    assert Redaction(["db7"])(told) == shown


@pytest.mark.parametrize(
    "told",
    [
        "::1, [::]:80, 127.0.0.1:80, http://localhost:8000, http://127.0.0.1:8000",
        "at 12:34:56 on 0000:65:00.0, aa:bb:cc:dd:ee:ff",
        '"Error": a::b::c, File "tensord/x.py:12", in y.py:13',
    ],
)
def test_what_tells_of_no_site_stays(told: str) -> None:
    redacted = Redaction(["db7"])
    redacted.learn(told)
    assert redacted(told) == told


def test_hosts_of_one_domain_are_replaced() -> None:
    assert Redaction(["db7.example.org"])("db7.example.org, a.db8.example.org, example.com") == (
        "<host>, <host>, example.com"
    )


def test_a_report_has_no_host_of_a_url_in_the_configuration(
    daemon: Daemon, ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names a neighbour and a store without the URL."""
    config = tmp_path / "tensord.toml"
    config.write_text(
        '[neighbours]\nservers = ["vllm=http://gpu9:8000"]\nbeyond_loopback = true\n'
        '[remote]\nurl = "valkey://ada@shelf:6379"\n'
    )
    daemon.flags["config"] = config
    daemon.restart()
    monkeypatch.setattr(facts, "journal", lambda _: ["vllm gpu9:8000 failed; Error 111 connecting to shelf:6379"])
    path = tmp_path / "report.txt"
    ctl("report", "--output", str(path))
    text = path.read_text()
    assert "vllm <host>:8000 failed; Error 111 connecting to <host>:6379" in text
    assert "valkey://<user>@<host>:6379" in text
    for told in ("gpu9", "shelf", "ada@"):
        assert told not in text, told


def test_the_site_s_own_names_are_replaced() -> None:
    assert report.site()(f"on {socket.gethostname()} in {os.environ.get('HOME', '/root')}/x").startswith(
        "on <host> in <home>/x"
    )
