from __future__ import annotations

import numpy as np
import pytest

import tensord

from ...daemon_process import MIB, Daemon
from .conftest import Ctl

SPACES = [tensord.Namespace(model=model, revision="r", dtype="f4", processor="p") for model in ("a", "b")]
KEYS = [space.key("encoder", "image", bytes([number])) for space in SPACES for number in range(3)]


@pytest.fixture
def filled(daemon: Daemon) -> tensord.Client:
    """A client after putting 1 MiB under each of KEYS."""
    client = daemon.client()
    for number, key in enumerate(KEYS):
        client.put(key, np.full(MIB - 4096, number, np.uint8), wait=True)
    assert all(client.contains(key) for key in KEYS)
    return client


def test_limit_takes_effect_at_once_and_both_ways(daemon: Daemon, ctl: Ctl, filled: tensord.Client) -> None:
    assert ctl("limit", "3MiB").out == "limit 16.0 MiB -> 3.00 MiB\n"
    daemon.until(lambda now: now["store"]["used_bytes"] <= 3 * MIB, "the store shrank")
    # Besides the entries, a place is lent, and some room is kept free for the next one.
    kept = sum(filled.contains(key) for key in KEYS)
    assert 1 <= kept <= 3
    assert ctl("limit", "8388608").out == "limit 3.00 MiB -> 8.00 MiB\n"
    filled.put(b"\7" * 32, np.zeros(4 * MIB, np.uint8), wait=True)
    assert sum(filled.contains(key) for key in KEYS) == kept


def test_a_limit_above_the_ring_is_the_ring_and_says_so(ctl: Ctl) -> None:
    told = ctl("limit", "1GiB").out
    assert told.startswith("limit 16.0 MiB -> 16.0 MiB\n")
    assert "ring_bytes" in told


def test_a_limit_that_would_empty_the_store_by_a_slip_is_refused(ctl: Ctl, filled: tensord.Client) -> None:
    assert "under 1MiB" in ctl("limit", "4", code=2).err
    assert all(filled.contains(key) for key in KEYS)


def test_evict_counts_a_key_given_twice_once_and_what_was_not_there(ctl: Ctl, filled: tensord.Client) -> None:
    assert ctl("evict", KEYS[0].hex(), KEYS[0].hex()[:62], "00" * 32).out == "evicted 1, 1 not stored\n"


def test_evict_does_nothing_unless_every_key_means_one_entry(ctl: Ctl, filled: tensord.Client) -> None:
    assert "give more digits" in ctl("evict", KEYS[0].hex(), SPACES[1].tag.hex(), code=1).err
    assert all(filled.contains(key) for key in KEYS)


def test_evict_sends_no_more_keys_at_once_than_the_daemon_takes(ctl: Ctl) -> None:
    keys = [number.to_bytes(32, "big").hex() for number in range(1025)]
    assert ctl("evict", *keys).out == "evicted 0, 1,025 not stored\n"


def test_clear_needs_yes(ctl: Ctl, filled: tensord.Client) -> None:
    assert "add --yes" in ctl("clear", code=2).err
    assert "add --yes" in ctl("clear", "--namespace-tag", SPACES[0].tag.hex(), code=2).err
    assert all(filled.contains(key) for key in KEYS)


def test_clear_of_a_namespace_leaves_the_others(ctl: Ctl, filled: tensord.Client) -> None:
    assert ctl("clear", "--namespace-tag", SPACES[0].tag.hex(), "--yes").out == "evicted 3\n"
    assert [filled.contains(key) for key in KEYS] == [False] * 3 + [True] * 3
    assert ctl("clear", "--yes").out == "evicted 3\n"
    assert not any(filled.contains(key) for key in KEYS)


@pytest.mark.parametrize(
    ("digits", "why"),
    [
        ("ff", "no stored key begins with ff; `tensorctl ls` lists them"),
        ("aa", "2 keys begin with aa: "),
        ("aa" * 8, "2 keys begin with aaaaaaaaaaaaaaaa: "),
    ],
)
def test_digits_that_mean_no_key_or_several_are_refused(daemon: Daemon, ctl: Ctl, digits: str, why: str) -> None:
    keys = ["aa" * 8 + "11" * 24, "aa" * 8 + "12" * 24, "ab" * 8 + "11" * 24]
    client = daemon.client()
    for key in keys:
        client.put(bytes.fromhex(key), 1, wait=True)
    assert why in ctl("evict", digits, code=1).err
    assert ctl("evict", "AB", "aa" * 8 + "12").out == "evicted 2\n", "odd or capital, of one namespace or several"
