"""`limit`, `evict`, `clear` and `room`, through real daemons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tensord
from tensord.client.ctl.orders import room_text
from tensord.client.ctl.output import WIDTH
from tensord.ipc.messages import control as messages
from tensord.testing import FakeCard

from ...daemon_process import MIB, Daemon
from ..device.card import watching
from . import documents
from .conftest import KEYS, SPACES, Ctl
from .documents import CARD, GIB


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
    told = ctl("limit", "1GiB").out
    assert told.startswith("limit 8.00 MiB -> 16.0 MiB\n") and "ring_bytes" in told, "no more than the ring"
    assert "under 1MiB" in ctl("limit", "4", code=2).err, "a slip"
    assert sum(filled.contains(key) for key in KEYS) == kept


def test_evict_counts_a_key_given_twice_once_and_what_was_not_there(ctl: Ctl, filled: tensord.Client) -> None:
    assert ctl("evict", KEYS[0].hex(), KEYS[0].hex()[:62], "00" * 32).out == "evicted 1, 1 not stored\n"


def test_evict_sends_no_more_keys_at_once_than_the_daemon_takes(ctl: Ctl) -> None:
    keys = [number.to_bytes(32, "big").hex() for number in range(1025)]
    assert ctl("evict", *keys).out == "evicted 0, 1,025 not stored\n"


def test_clear_needs_yes_and_that_of_a_namespace_leaves_the_others(ctl: Ctl, filled: tensord.Client) -> None:
    assert "add --yes" in ctl("clear", code=2).err
    assert "add --yes" in ctl("clear", "--namespace-tag", SPACES[0].tag.hex(), code=2).err
    assert all(filled.contains(key) for key in KEYS)
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


CARDS = ["0000:65:00.0", "0000:66:00.0"]


@pytest.fixture
def carded(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two cards of 80 GiB, of which the first uses 75."""
    cards = [FakeCard(tmp_path, name, 80 * GIB) for name in CARDS]
    cards[0].occupy(75 * GIB)
    with watching(cards[0]) as daemon:
        daemon.start()
        daemon.until(lambda status: len(status["governor"]["gauges"]) == 2, "the first sample")
        yield daemon


def test_a_card_that_is_not_there_is_named(carded: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    ctl = Ctl(capsys, carded.socket)
    assert f"name one; the daemon's cards are {', '.join(CARDS)}" in ctl("room", "3GiB", code=2).err
    assert "no card is called '7'" in ctl("room", "3GiB", "--card", "7", code=2).err


def test_the_only_card_need_not_be_named_and_without_one_the_doctor_says_why(recorded: Callable[..., Ctl]) -> None:
    gauges = [documents.gauge("host", 1, 2, "normal")]
    none = recorded(StatusQuery=documents.status(governor=documents.governor(gauges=gauges)))
    assert "the daemon reads no card; its log says why" in none("room", "1GiB", code=1).err


def test_an_answer_says_who_freed_what_and_why_not_more() -> None:
    steps = [
        messages.RoomStep("cached tensors", "freed", 2 * GIB),
        messages.RoomStep("vllm 127.0.0.1:8000", "left alone", 0, "3 requests run or wait"),
        messages.RoomStep("ollama 127.0.0.1:11434", "failed", 1 * GIB, "the connection was closed"),
        messages.RoomStep("comfyui 127.0.0.1:8188", "nothing", 0, "x " * 100),
    ]
    lines = room_text(CARD, 8 * GIB, messages.RoomMade(1, False, 0.0, 5 * GIB, steps, "why")).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line[24:] for line in lines[:4]] == [
        "no room: 5.00 GiB of 8.00 GiB are missing",
        "freed 2.00 GiB",
        "left alone: 3 requests run or wait",
        "FAILED: the connection was closed; 1.00 GiB came free",
    ]
    assert lines[4][24:].startswith("freed nothing: x")
    made = room_text(CARD, 8 * GIB, messages.RoomMade(1, True, 600.0, 0, []))
    assert made.split(maxsplit=1)[1] == "8.00 GiB are free, and held for 10m00s"


def test_the_answer_as_json_and_the_exit_code_say_whether_there_is_room(
    carded: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl = Ctl(capsys, carded.socket)
    made = json.loads(ctl("room", "3GiB", "--card", "0", "--json", "--for", "50m").out)
    assert made["made"] and made["lasts_s"] == 3000.0 and made["missing_bytes"] == 0
    told = ctl("room", "3GiB", "--card", "0", "--json", code=1)
    assert json.loads(told.out)["missing_bytes"] == 1 * GIB and "(3.00 GiB more are reserved)" in told.err
    assert ctl("room", "0", "--card", "0").out == f"{CARDS[0]}: 1 room ended\n"
