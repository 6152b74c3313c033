"""`tensorctl why`, through a real daemon; and the words for each answer."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.ctl.output import WIDTH
from tensord.client.ctl.show.why import why_text

from ....daemon_process import Daemon
from .. import documents
from ..conftest import Ctl

SPACE = tensord.Namespace(model="m", revision="r", dtype="f4", processor="p")
MIB = 1 << 20


def _key(number: int) -> bytes:
    return SPACE.key("encoder", "image", b"%d" % number)


def _put(client: tensord.Client, *numbers: int) -> None:
    for number in numbers:
        client.put(_key(number), np.zeros(MIB - 4096, np.uint8), wait=True)


def test_why_prints_the_rank_of_a_stored_entry_and_why_another_was_removed(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    _put(client, *range(10))
    assert client.get(_key(5)) is not None and client.get(_key(5)) is not None
    daemon.until(lambda now: now["store"]["hits"] == 2, "the reads are known")
    told = json.loads(ctl("why", "--json", _key(5).hex()).out)
    assert (told["state"], told["policy"], told["entry"]["uses"]) == ("stored", "hazard", 2)
    assert told["standing"]["compared"] == 9
    text = " ".join(ctl("why", _key(5).hex()[:40]).out.split())
    assert f"key {_key(5).hex()}" in text
    assert "used twice, last " in text
    assert "class used 2 to 3 times; too few similar entries are known" in text
    assert "colder 0.0 % of 9 other" in " ".join(ctl("why", _key(0).hex()).out.split())
    client.evict(_key(5))
    text = " ".join(ctl("why", _key(5).hex()).out.split())
    assert "not stored any more" in text and "(explicit): a client evicted it" in text
    _put(client, 5)
    assert "removed before" in ctl("why", _key(5).hex()).out


def test_a_lease_is_seen_at_once_and_so_is_its_end(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client(name="engine")
    _put(client, 1, 2)
    for _ in range(3):
        leased = client.get(_key(1))
        standing = json.loads(ctl("why", "--json", _key(1).hex()).out)["standing"]
        assert (standing["held"], standing["lanes"]) == ("lease", 1)
        (holder,) = standing["held_by"]
        assert (holder["name"], holder["pid"]) == ("engine", os.getpid())
        told = " ".join(ctl("why", _key(1).hex()).out.split())
        assert f"held 1 lane pins it now (client {holder['client']}, engine, pid {os.getpid()})" in told
        assert json.loads(ctl("why", "--json", _key(2).hex()).out)["standing"]["held"] is None
        del leased
        standing = json.loads(ctl("why", "--json", _key(1).hex()).out)["standing"]
        assert (standing["held"], standing["lanes"], standing["held_by"]) == (None, 0, [])


def test_why_of_a_key_that_was_never_put_says_so_with_exit_code_1(daemon: Daemon, ctl: Ctl) -> None:
    assert "not known: not stored" in ctl("why", "00" * 32, code=1).out
    assert json.loads(ctl("why", "--json", "00" * 32, code=1).out)["state"] == "unknown"
    assert "no stored key begins with 00" in ctl("why", "00", code=1).err
    _put(daemon.client(), 1, 2)
    assert "2 keys begin with" in ctl("why", SPACE.tag.hex(), code=1).err


STANDING: dict[str, Any] = {
    "worth": 1.25e-8,
    "uses": 3,
    "like": ["used 2 to 3 times", "its agent waits for a tool"],
    "comes_back": 0.314,
    "in_window": False,
    "age_s": 600.0,
    "idle_s": 40.0,
    "compared": 128,
    "colder": 32,
    "children": 0,
    "held": None,
    "lanes": 0,
    "held_by": [],
}
ENTRY: dict[str, Any] = {**documents.entry(7), "uses": 2, "cost_ms": 12.5}
BLOCK: dict[str, Any] = {"start": 1024, "tokens": 256, "snapshot": False, "children": 1, "parent": None}
LANE: dict[str, Any] = {"client": 3, "name": "engine", "pid": 77, "lane": 0x100000001}
STORED: dict[str, Any] = {
    "key": "12" * 32,
    "state": "stored",
    "reason": "",
    "policy": "hazard",
    "entry": ENTRY,
    "standing": STANDING,
    "gone": None,
    "remembered": None,
    "records": 10,
    "up_s": 192.0,
}
NOT_STORED: dict[str, Any] = {**STORED, "state": "unknown", "entry": None, "standing": None}
REMEMBERED: dict[str, Any] = {**NOT_STORED, "state": "gone", "remembered": STANDING}
GONE: dict[str, Any] = {
    "reason": "ttl",
    "gone_unix_s": 1e9,
    "gone_s": 60.0,
    "age_s": 3600.0,
    "idle_s": 70.0,
    "uses": 1,
    "worth": 0.5,
}


LANES: dict[str, Any] = {"held": "lease", "lanes": 6, "held_by": [LANE]}
NOBODY: dict[str, Any] = {"held": "pin", "lanes": 1, "held_by": [{**LANE, "client": None, "name": "", "pid": None}]}
SNAPSHOT = {**BLOCK, "snapshot": True, "parent": "ab" * 32}


def stored(policy: str = "hazard", **standing: Any) -> dict[str, Any]:
    return {**STORED, "policy": policy, "standing": {**STANDING, **standing}}


def entry(**changed: Any) -> dict[str, Any]:
    return {**STORED, "entry": {**ENTRY, **changed}}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (STORED, "stored 10m00s ago, used twice, last 40s ago"),
        (STORED, "entry 9.00 MiB, tokens 1,024, by uid 1000, cost 12.5 ms"),
        (entry(prefix=BLOCK, agent="a"), "of a sequence tokens 1,024 to 1,280, agent a; parent none: it begins here"),
        (entry(prefix=SNAPSHOT), f"snapshot at token 1,024; parent {'ab' * 32}"),
        (entry(parent="ab" * 32), f"of a chain parent {'ab' * 32}"),
        (STORED, "its agent waits for a tool; entries like it come back in 31 % of cases"),
        (STORED, "worth 1.25e-08 by policy hazard; the lowest worth is evicted first"),
        (stored("lru", worth=104_233.0), "worth 104,233 by policy lru, the number of its last use among all uses of"),
        (stored(worth=1.23456e-7), "worth 1.23456e-07 by policy hazard"),
        (stored(idle_s=0.04), "used twice, last 40 ms ago"),
        (STORED, "25.0 % of 128 other evictable entries are evicted before it"),
        (stored(compared=1), "of 1 other evictable entry is evicted before it"),
        (stored(compared=0), "no other entry is evictable"),
        (stored(in_window=True), "it is evicted only if no other entry can be"),
        (stored(held="pin"), "it stays until that time ends"),
        (stored(held="lease", lanes=None), "a reader held it at the last scan"),
        (stored(**LANES), "held 6 lanes pin it now (client 3, engine, pid 77; and 5 more): it stays while a reader"),
        (stored(**NOBODY), "held 1 lane pins it now (lane 100000001 of a closed connection)"),
        (stored(children=1), "children 1 child: a block"),
        (stored(children=2), "children 2 children: a block is evicted after all of its children"),
        ({**STORED, "gone": GONE}, "removed before 1m00s ago (ttl): its time to live had ended"),
        ({**NOT_STORED, "state": "leaving", "reason": "capacity"}, "leaving, unless a reader holds it: evicted"),
        (
            {**NOT_STORED, "state": "gone", "gone": GONE},
            "stored 1h00m before, used once, last 1m10s before its worth 0.5",
        ),
        (REMEMBERED, "remembered 3 uses, puts included class used"),
        (NOT_STORED, "not known: not stored, and not among the last 10 removed entries since the daemon started 3m12s"),
    ],
)
def test_each_answer_is_printed_in_words_within_100_columns(told: dict[str, Any], words: str) -> None:
    text = why_text(told)
    assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= WIDTH
