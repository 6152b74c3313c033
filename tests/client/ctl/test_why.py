"""`tensorctl why`, through a real daemon."""

from __future__ import annotations

import json
import os

import numpy as np

import tensord

from ...daemon_process import Daemon
from .conftest import Ctl

SPACE = tensord.Namespace(model="m", revision="r", dtype="f4", processor="p")
MIB = 1 << 20


def _key(number: int) -> bytes:
    return SPACE.key("encoder", "image", b"%d" % number)


def _put(client: tensord.Client, *numbers: int) -> None:
    for number in numbers:
        client.put(_key(number), np.zeros(MIB - 4096, np.uint8), wait=True)


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
        standing = json.loads(ctl("why", "--json", _key(1).hex()).out)["standing"]
        assert (standing["held"], standing["lanes"]) == ("lease", 1)
        (holder,) = standing["held_by"]
        assert (holder["name"], holder["pid"]) == ("engine", os.getpid())
        assert f"held_by client {holder['client']} standing held_by name engine" in shown(ctl, _key(1).hex())
        assert json.loads(ctl("why", "--json", _key(2).hex()).out)["standing"]["held"] is None
        del leased
        standing = json.loads(ctl("why", "--json", _key(1).hex()).out)["standing"]
        assert (standing["held"], standing["lanes"], standing["held_by"]) == (None, 0, [])


def test_why_of_a_key_that_was_never_put_says_so_with_exit_code_1(daemon: Daemon, ctl: Ctl) -> None:
    assert "state unknown" in " ".join(ctl("why", "00" * 32, code=1).out.split())
    assert json.loads(ctl("why", "--json", "00" * 32, code=1).out)["state"] == "unknown"
    assert "no stored key begins with 00" in ctl("why", "00", code=1).err
    _put(daemon.client(), 1, 2)
    assert "2 keys begin with" in ctl("why", SPACE.tag.hex(), code=1).err
