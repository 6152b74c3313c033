"""`ls`, `why`, `clients`, `watch`, `latency` and `advise`: what a real daemon has, and documents written down."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.ctl.output import WIDTH
from tensord.client.ctl.show import advice_text
from tensord.ipc.messages.control import Event

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from .conftest import COMMAND, KEYS, SPACES, Ctl

KEY = KEYS[0]


def listed(ctl: Ctl, *words: str) -> set[str]:
    return {entry["key"] for entry in json.loads(ctl("ls", "--json", *words).out)["entries"]}


def test_ls_lists_every_entry_once_or_those_of_a_namespace(daemon: Daemon, ctl: Ctl) -> None:
    assert len(ctl("ls").out.splitlines()) == 1
    client = daemon.client()
    for number, key in enumerate(KEYS):
        client.put(key, np.zeros(100 * (number + 1), np.uint8), tokens=number, wait=True)
    lines = ctl("ls").out.splitlines()
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(key.hex()[:28] for key in KEYS)
    assert listed(ctl) == {key.hex() for key in KEYS}
    assert listed(ctl, "--namespace-tag", SPACES[1].tag.hex()) == {key.hex() for key in KEYS[3:]}
    assert len(ctl("ls", "-n", "2").out.splitlines()) == 3


def test_ls_goes_on_behind_what_one_answer_holds(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    keys = [SPACES[0].key("encoder", "image", number.to_bytes(2, "big")) for number in range(1100)]
    for key in keys:
        client.put(key, 1)
    daemon.until(lambda now: now["store"]["entries"] == len(keys), "all are stored")
    assert listed(ctl) == {key.hex() for key in keys}
    assert len(listed(ctl, "-n", "1050")) == 1050


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
    client.close()
    daemon.until(lambda now: now["clients"] == 0, "the daemon saw it go")
    assert ctl("clients").out.splitlines()[1].endswith("orphaned"), "its views live"


@pytest.mark.parametrize(("end", "code", "said"), [("ctrl-c", 0, ""), ("the daemon goes", 1, "is gone")])
def test_watch_prints_each_event_as_a_line_of_json_until_ctrl_c_or_the_daemon_s_end(
    daemon: Daemon, ctl: Ctl, end: str, code: int, said: str
) -> None:
    began = time.time()
    client, keys = daemon.client(), (os.urandom(32) for _ in count())
    with Popen([*COMMAND, *ctl.flags, "watch"], stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        os.set_blocking(watching.stdout.fileno(), False)
        stdout = watching.stdout

        def evicted() -> dict[str, Any]:
            client.put(next(keys), np.zeros(MIB, np.uint8), wait=True)
            events = [json.loads(line) for line in stdout.readlines()]
            return next((event for event in events if event["event"] == "evict"), {})

        gone = until(evicted, "an eviction to be told")
        if end == "ctrl-c":
            watching.send_signal(signal.SIGINT)
        else:
            daemon.terminate()
        assert watching.wait(PATIENCE_S) == code
        assert said in watching.stderr.read()
    assert (gone["reason"], gone["uses"], gone["dropped"]) == ("capacity", 0, 0)
    assert began <= gone["unix_s"] <= time.time()
    assert gone["age_s"] >= gone["idle_s"] >= 0
    assert gone["worth"] >= 0


def test_dropped_events_are_counted(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def events(_: object) -> Iterator[Event]:
        yield Event({"event": "put"}, 0)
        yield Event({"event": "evict"}, 5)
        yield Event({"event": "put"}, 1000)

    monkeypatch.setattr("tensord.client.ctl.daemon.Daemon.events", events)
    assert len(ctl("watch", "--count", "2").out.splitlines()) == 2
    told = ctl("watch")
    assert [json.loads(line)["dropped"] for line in told.out.splitlines()] == [0, 5, 1000]
    assert "1,005 events were dropped" in told.err


def test_latency_names_the_slow_request_its_client_and_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon() as daemon:
        file = daemon.folder / "tensord.toml"
        file.write_text("[log]\nslow_s = 3600\n")
        daemon.flags["config"] = file
        client = daemon.start().client(name="encoder-1")
        ctl = Ctl(capsys, daemon.socket)
        assert "no request took longer than 3.6e+06 ms" in ctl("latency").out
        file.write_text("[log]\nslow_s = 0\n")
        ctl("reload")
        client.put(KEY, np.zeros(1000), wait=True)
        client.put(KEYS[1], np.zeros(1000), wait=True)
        rows = json.loads(ctl("latency", "--json").out)["slow"]
        assert all(0 < row["took_s"] < 60 for row in rows)
        assert {"StatusQuery", "ConfigQuery"} & {row["kind"] for row in rows}
        lines = ctl("latency", "--count", "3").out.split("\n\n")[1].splitlines()
        took = [float(line.split()[3]) for line in lines[1:]]
        assert len(took) == 3 and took == sorted(took, reverse=True)


MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
RISING = (0.1, 0.2, 0.3, 0.43, 0.5, 0.61, 0.65, 0.7, 0.9)


def test_the_hit_ratio_of_each_size_is_told() -> None:
    points = [[int(at * 1000 * MIB), ratio] for at, ratio in zip(MULTIPLES, RISING, strict=True)]
    told = {"policy": "hazard", "here": 0.452, "capacity_bytes": 1000 * MIB, "requests": 12345.0, "points": points}
    told["sampled_requests"] = 500
    shown = advice_text(told)
    assert max(map(len, shown.splitlines())) <= WIDTH
    text = "\n".join(" ".join(line.split()) for line in shown.splitlines())
    assert "found here 45.2 %, under policy hazard" in text
    assert "1.00 1000 MiB 43.0 % now\n" in text and "2.00 1.95 GiB 61.0 %\n" in text
    assert "reuse" not in text


def _key(number: int) -> bytes:
    return SPACES[0].key("encoder", "image", b"%d" % number)


def _put(client: tensord.Client, *numbers: int) -> None:
    for number in numbers:
        client.put(_key(number), np.zeros(MIB - 4096, np.uint8), wait=True)


def standing_of(ctl: Ctl, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ctl("why", "--json", _key(number).hex()).out)["standing"]
    return found


def shown(ctl: Ctl, key: str) -> str:
    """The answer as text, its lines joined."""
    return " ".join(ctl("why", key).out.split())


def test_why_prints_the_rank_of_a_stored_entry_and_why_another_was_removed(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    _put(client, *range(10))
    assert client.get(_key(5)) is not None and client.get(_key(5)) is not None
    daemon.until(lambda now: now["store"]["hits"] == 2, "the reads are known")
    told = json.loads(ctl("why", "--json", _key(5).hex()).out)
    assert (told["state"], told["policy"], told["entry"]["uses"]) == ("stored", "hazard", 2)
    assert told["standing"]["compared"] == 9
    text = shown(ctl, _key(5).hex()[:40])
    assert f"key {_key(5).hex()}" in text
    assert "entry payload_bytes 1020 KiB" in text and "entry uses 2" in text
    assert "standing like used 2 to 3 times" in text and "standing in_window no" in text
    assert "standing compared 9 standing colder 0" in shown(ctl, _key(0).hex())
    assert "gone" not in text and "remembered" not in text
    client.evict(_key(5))
    text = shown(ctl, _key(5).hex())
    assert "state gone" in text and "gone reason explicit" in text
    _put(client, 5)
    assert "state stored" in (text := shown(ctl, _key(5).hex())) and "gone reason explicit" in text


def test_a_lease_is_seen_at_once_and_so_is_its_end(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client(name="engine")
    _put(client, 1, 2)
    for _ in range(3):
        leased = client.get(_key(1))
        standing = standing_of(ctl, 1)
        assert (standing["held"], standing["lanes"]) == ("lease", 1)
        (holder,) = standing["held_by"]
        assert (holder["name"], holder["pid"]) == ("engine", os.getpid())
        assert f"held_by client {holder['client']} standing held_by name engine" in shown(ctl, _key(1).hex())
        assert standing_of(ctl, 2)["held"] is None
        del leased
        standing = standing_of(ctl, 1)
        assert (standing["held"], standing["lanes"], standing["held_by"]) == (None, 0, [])


def test_why_of_a_key_that_was_never_put_says_so_with_exit_code_1(daemon: Daemon, ctl: Ctl) -> None:
    assert "state unknown" in " ".join(ctl("why", "00" * 32, code=1).out.split())
    assert json.loads(ctl("why", "--json", "00" * 32, code=1).out)["state"] == "unknown"
    assert "no stored key begins with 00" in ctl("why", "00", code=1).err
    _put(daemon.client(), 1, 2)
    assert "2 keys begin with" in ctl("why", SPACES[0].tag.hex(), code=1).err
