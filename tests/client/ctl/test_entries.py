from __future__ import annotations

import json

import numpy as np
import pytest

import tensord
from tensord.client.ctl.entries import entries_text, entry_text
from tensord.client.ctl.tables import WIDTH

from ...daemon_process import Daemon
from .conftest import Ctl

SPACES = [tensord.Namespace(model=model, revision="r", dtype="f4", processor="p") for model in ("a", "b")]
KEYS = [space.key("encoder", "image", bytes([number])) for space in SPACES for number in range(3)]


def _fill(daemon: Daemon) -> None:
    client = daemon.client()
    for number, key in enumerate(KEYS):
        client.put(key, np.zeros(100 * (number + 1), np.uint8), tokens=number, wait=True)


def test_ls_lists_every_entry_once(daemon: Daemon, ctl: Ctl) -> None:
    assert len(ctl("ls").out.splitlines()) == 1
    _fill(daemon)
    lines = ctl("ls").out.splitlines()
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(key.hex()[:28] for key in KEYS)
    assert max(map(len, lines)) <= WIDTH
    assert sorted(line.split()[0] for line in ctl("ls", "--full-keys").out.splitlines()[1:]) == sorted(
        key.hex() for key in KEYS
    )
    assert {entry["key"] for entry in json.loads(ctl("ls", "--json").out)["entries"]} == {key.hex() for key in KEYS}


def test_ls_of_a_namespace_lists_no_other(daemon: Daemon, ctl: Ctl) -> None:
    _fill(daemon)
    listed = json.loads(ctl("ls", "--json", "--namespace-tag", SPACES[1].tag.hex()).out)["entries"]
    assert {entry["key"] for entry in listed} == {key.hex() for key in KEYS[3:]}
    assert len(ctl("ls", "-n", "2").out.splitlines()) == 3


def test_ls_goes_on_behind_what_one_answer_holds(daemon: Daemon, ctl: Ctl) -> None:
    client = daemon.client()
    keys = [SPACES[0].key("encoder", "image", number.to_bytes(2, "big")) for number in range(1100)]
    for key in keys:
        client.put(key, 1)
    daemon.until(lambda now: now["store"]["entries"] == len(keys), "all are stored")
    listed = [entry["key"] for entry in json.loads(ctl("ls", "--json").out)["entries"]]
    assert sorted(listed) == sorted(key.hex() for key in keys)
    assert len(json.loads(ctl("ls", "--json", "-n", "1050").out)["entries"]) == 1050


def test_show_takes_as_many_digits_as_tell_a_key_apart(daemon: Daemon, ctl: Ctl) -> None:
    _fill(daemon)
    digits = next(n for n in range(1, 65) if sum(key.hex()[:n] == KEYS[4].hex()[:n] for key in KEYS) == 1)
    told = ctl("show", KEYS[4].hex()[:digits].upper()).out
    assert KEYS[4].hex() in told
    assert "never" in told
    entry = json.loads(ctl("show", "--json", KEYS[4].hex()).out)["entry"]
    assert (entry["key"], entry["tokens"]) == (KEYS[4].hex(), 4)
    assert "give more digits" in ctl("show", SPACES[0].tag.hex(), code=1).err


def test_show_of_what_is_not_stored_says_so(ctl: Ctl) -> None:
    assert "is not stored" in ctl("show", "00" * 32, code=1).err
    assert "no stored key begins with 00" in ctl("show", "00", code=1).err


ENTRY = {
    "key": "ab" * 32,
    "namespace": "ab" * 8,
    "payload_bytes": 2 << 30,
    "span_bytes": (2 << 30) + 192,
    "tree_bytes": 65_472,
    "tokens": 1_000_000,
    "uses": 999_999_999,
    "created_unix_s": 1000.0,
    "used_unix_s": 1060.0,
    "expires_unix_s": 1192.0,
    "pinned_by_message": True,
    "owner_uid": 4_000_000_000,
    "span_id": 1 << 48,
}


def test_show_and_why_name_the_parent_and_count_the_children(daemon: Daemon, ctl: Ctl) -> None:
    first, second = KEYS[:2]
    with daemon.client() as client:
        client.put(first, 1, wait=True)
        client.put(second, 2, parent=first, wait=True)
    for command in ("show", "why"):
        assert "1 child" in ctl(command, first.hex()).out
    assert "the chain begins here" in ctl("show", first.hex()).out
    assert first.hex() in ctl("show", second.hex()).out
    assert json.loads(ctl("show", "--json", second.hex()).out)["entry"]["parent"] == first.hex()
    assert "chain" not in entry_text(ENTRY, 1072.0), "an entry without parent and children"


@pytest.mark.parametrize("now", [1000.0, 1072.0, 1e9])
def test_entries_fit_100_columns_whatever_is_in_them(now: float) -> None:
    assert max(map(len, entries_text([ENTRY], now).splitlines())) <= WIDTH
    assert max(map(len, entry_text(ENTRY, now).splitlines())) <= WIDTH
    linked = {**ENTRY, "parent": "cd" * 32, "children": 1_000_000}
    assert max(map(len, entry_text(linked, now).splitlines())) <= WIDTH


def test_ages_and_ends_are_counted_from_now() -> None:
    row = entries_text([ENTRY], 1072.0).splitlines()[1].split()
    assert row[-6:] == ["1.0G", "1m12s", "12s", "2m00s", "4000000000", "yes"]
