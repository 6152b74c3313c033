from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from typing import IO, Any

import numpy as np
import pytest

import tensord
from tensord.client.ctl.live import clients_text
from tensord.client.ctl.tables import WIDTH
from tensord.ipc.messages import Event

from ...daemon_process import PATIENCE_S, Daemon, until
from .conftest import Ctl

KEY = bytes(range(32))


def test_clients_lists_who_is_attached_and_what_they_hold(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client(name="encoder-1")
    client.put(KEY, [1, 2], wait=True)
    leases = [client.get(KEY) for _ in range(3)]
    assert None not in leases
    rows = json.loads(ctl("clients", "--json").out)["clients"]
    assert [(row["name"], row["pid"], row["pins"]) for row in rows] == [("encoder-1", os.getpid(), 3)]
    (line,) = ctl("clients").out.splitlines()[1:]
    assert line.split()[1:4] == ["encoder-1", str(os.getpid()), str(os.getuid())]
    assert line.endswith("attached")


def test_a_lane_whose_connection_ended_is_shown_as_orphaned_while_its_views_live(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    client.put(KEY, b"x" * 1000, wait=True)
    lease = client.get(KEY)
    client.close()
    daemon.until(lambda now: now["clients"] == 0, "the daemon saw it go")
    assert lease is not None
    assert ctl("clients").out.splitlines()[1].endswith("orphaned")


def test_a_client_before_its_first_attachment_is_shown_without_a_lane(daemon: Daemon) -> None:
    row = {"client": 1, "name": "n", "pid": 2, "uid": 0, "lane": None, "orphaned": False, "pins": 0, "hits": 0}
    assert clients_text([{**row, "misses": 0}]).endswith("greeted")


def test_clients_fit_100_columns_whatever_they_call_themselves() -> None:
    row: dict[str, Any] = {"client": 10**6, "name": "n" * 128, "pid": 4_194_304, "uid": 4_000_000_000, "orphaned": True}
    row |= {"lane": (1 << 48) - 1, "pins": 4096, "hits": 10**9, "misses": 10**9}
    assert max(map(len, clients_text([row]).splitlines())) <= WIDTH


_numbers = count(1)


def put_one(client: tensord.Client, payload_bytes: int = 1) -> bool:
    """Puts something new. A watcher is told only of events after it has begun, so that tests make them until it has."""
    number = next(_numbers)
    key = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return client.put(key, b"x" * payload_bytes, wait=True).state == "stored"


def until_watching(client: tensord.Client, stdout: IO[str]) -> None:
    """Puts until a watcher tells of one."""
    os.set_blocking(stdout.fileno(), False)
    until(lambda: put_one(client) and stdout.readline(), "the watcher to tell of a put")


def test_watch_prints_each_event_as_a_line_of_json(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    with ctl.spawn("watch", "--count", "3") as watching:
        until(lambda: put_one(client) and watching.poll() is not None, "the watcher to have heard three events")
        out, err = watching.communicate(timeout=PATIENCE_S)
    events = [json.loads(line) for line in out.splitlines()]
    assert len(events) == 3
    assert {event["event"] for event in events} <= {"put", "evict"}
    assert all(len(event["key"]) == 64 for event in events)
    assert [event["dropped"] for event in events] == [0] * 3
    assert (watching.returncode, err) == (0, "")


def test_watch_describes_each_removed_entry(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    with ctl.spawn("watch") as watching:
        assert watching.stdout is not None
        os.set_blocking(watching.stdout.fileno(), False)
        stdout = watching.stdout

        def evicted() -> dict[str, Any]:
            put_one(client, 1 << 20)
            events = [json.loads(line) for line in stdout.readlines()]
            return next((event for event in events if event["event"] == "evict"), {})

        gone = until(evicted, "an eviction to be told")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE_S) == 0
    assert (gone["reason"], gone["uses"]) == ("capacity", 0)
    assert gone["age_s"] >= gone["idle_s"] >= 0
    assert gone["worth"] >= 0


def test_watch_ends_with_ctrl_c(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    with ctl.spawn("watch") as watching:
        assert watching.stdout is not None
        until_watching(client, watching.stdout)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE_S) == 0


def test_watch_says_when_the_daemon_goes(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    with ctl.spawn("watch") as watching:
        assert watching.stdout is not None
        until_watching(client, watching.stdout)
        daemon.terminate()
        assert watching.wait(PATIENCE_S) == 1
        assert watching.stderr is not None
        assert "is gone" in watching.stderr.read()


def test_dropped_events_are_counted(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def events(_: object) -> Iterator[Event]:
        yield Event({"event": "put"}, 0)
        yield Event({"event": "evict"}, 5)
        yield Event({"event": "put"}, 1000)

    monkeypatch.setattr("tensord.client.ctl.daemon.Daemon.events", events)
    told = ctl("watch")
    assert [json.loads(line)["dropped"] for line in told.out.splitlines()] == [0, 5, 1000]
    assert "1,005 events were dropped" in told.err


def test_each_event_tells_its_time_and_a_client_that_comes_and_goes(daemon: Daemon, ctl: Ctl) -> None:
    began = time.time()
    watching = ctl.spawn("watch", "--count", "3")
    until(lambda: _watched(daemon, watching), "the watcher to have heard three events")
    events = [json.loads(line) for line in watching.communicate(timeout=PATIENCE_S)[0].splitlines()]
    assert {event["event"] for event in events} <= {"attach", "leave"}
    assert all(began <= event["unix_s"] <= time.time() for event in events)
    assert events[0]["name"] == "comes and goes"


def _watched(daemon: Daemon, watching: subprocess.Popen[str]) -> bool:
    """Makes a client that comes and goes; true once the watcher has ended."""
    daemon.client(name="comes and goes").close()
    return watching.poll() is not None


def test_the_log_at_debug_has_each_attach_put_refusal_and_eviction() -> None:
    with Daemon(log_level="debug", log_format="json") as daemon:
        client = daemon.start().client(name="talker")
        client.put(KEY, np.zeros(4), wait=True)
        client.put(b"z" * 32, 1, parent=b"z" * 31 + b"y", wait=True)
        client.evict(KEY)

        def events() -> dict[str, dict[str, Any]]:
            # The last line may be one that is being written.
            lines = [json.loads(line) for line in daemon.log.splitlines(keepends=True) if line.endswith("\n")]
            said = {line["event"]: line for line in lines if line["part"] == "event"}
            return said if {"attach", "put", "refuse", "evict"} <= said.keys() else {}

        said = until(events, "all of them to be logged")
    assert (said["attach"]["name"], said["attach"]["level"]) == ("talker", "debug")
    assert said["refuse"]["code"] == "ParentGone"


def test_the_log_at_info_has_no_events() -> None:
    with Daemon(log_format="json") as daemon:
        daemon.start().client().put(KEY, 1, wait=True)
        assert not [line for line in daemon.log.splitlines() if json.loads(line)["part"] == "event"]
