"""Owners of device entries that end, stand still, or lose their daemon: theirs goes, or waits, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import OwnedElsewhere
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.device.card import (
    CARD,
    ENTRY_BYTES,
    filled,
    filled_until,
    held,
    host_values,
    key,
    put_some,
    values,
    watching,
)
from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage

ENTRIES = 4


@pytest.fixture
def running(card: FakeCard) -> Iterator[Daemon]:
    with watching(card, pressure_ack_s="500ms") as daemon:
        yield daemon.start()


def owner(stage: Stage, socket: Path, folder: Path, first: int) -> None:
    """Holds ENTRIES entries, and says what became of them when asked."""
    vram = FakeVram(FakeCard(folder, CARD))
    cache = tensord.DeviceCache(tensord.Client(socket, name=f"owner-{first}", timeout_s=PATIENCE_S), vram)
    states = [put.state for put in put_some(cache, vram, range(first, first + ENTRIES))]
    stage.tell(states)
    while True:
        question = stage.hear()
        if question == "size":
            stage.tell(cache.size)
        elif question == "error":
            stage.tell(repr(cache.error))
        elif question == "registered":
            put = cache.put(key(100 + first), {"a": vram.upload(values(100 + first))}, wait=True, timeout_s=30)
            stage.tell(put.state)


def started(daemon: Daemon, card: FakeCard, first: int) -> Child:
    child = Child(owner, daemon.socket, card.folder, first)
    assert child.hear() == ["registered"] * ENTRIES
    return child


def governor(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["governor"]
    return found


def owners(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in governor(daemon)["owners"]}


def adds_up(daemon: Daemon) -> bool:
    state = governor(daemon)
    count = state["counters"]
    resident = sum(row["entries"] for row in state["devices"])
    gone: int = count["offloaded"] + count["dropped"] + count["released"] + count["gone_with_owner"]
    return bool(count["registered"] == resident + gone)


def test_a_killed_owner_s_entries_end_and_other_owners_keep_theirs(running: Daemon, card: FakeCard) -> None:
    with started(running, card, 0) as killed, started(running, card, 10) as other:
        assert sum(row["entries"] for row in owners(running).values()) == 2 * ENTRIES
        killed.kill()
        running.until(
            lambda status: status["governor"]["counters"]["gone_with_owner"] == ENTRIES, "the daemon to count them"
        )
        assert list(owners(running)) == ["owner-10"]
        assert adds_up(running)
        other.tell("size")
        assert other.hear() == ENTRIES
        assert card.refresh()[0] == ENTRIES * ENTRY_BYTES
        with started(running, card, 0):
            assert owners(running)["owner-0"]["entries"] == ENTRIES


def ordered(status: dict[str, Any]) -> set[str]:
    return {row["name"] for row in status["governor"]["owners"] if row["ordered_entries"]}


def test_an_owner_that_does_not_answer_is_shown_and_the_others_go_on(running: Daemon, card: FakeCard) -> None:
    with started(running, card, 0) as silent, started(running, card, 10) as other:
        silent.pause()
        try:
            filled_until(card, 0.93, lambda: owners(running)["owner-0"]["unresponsive"], "it to be shown")
            filled_until(card, 0.93, lambda: owners(running)["owner-10"]["entries"] == 0, "the other one to give back")
            shown = owners(running)
            assert shown["owner-0"]["entries"] == ENTRIES and not shown["owner-10"]["unresponsive"]
            assert running.status()["governor"]["counters"]["timed_out"] >= ENTRIES
            filled(card, 0.8)
            other.tell("registered")
            assert other.hear() == "registered"
        finally:
            silent.resume()
        running.until(lambda _: not owners(running)["owner-0"]["unresponsive"], "it to be heard again")
        filled_until(card, 0.93, lambda: owners(running)["owner-0"]["entries"] == 0, "what it gave back late to count")
        silent.tell("size")
        assert silent.hear() == 0
        silent.tell("error")
        assert silent.hear() == "None"
        assert adds_up(running)


def test_a_daemon_killed_in_the_middle_of_an_order_loses_no_entry(running: Daemon, card: FakeCard) -> None:
    vram = FakeVram(card)
    cache = tensord.DeviceCache(running.client(), vram)
    with vram.stream.hold() as hold:
        put_some(cache, vram, range(ENTRIES))
        filled(card, 0.93)
        running.until(lambda status: status["governor"]["counters"]["ordered"] >= ENTRIES, "the order")
        running.kill()
        until(lambda: not cache.client.connected, "the client to notice")
        hold.release()
    for n in range(ENTRIES):
        with held(cache, key(n)) as lease:
            assert lease.tier == "device"
            assert np.array_equal(host_values(lease.tree), values(n))
    card.occupy(0)
    running.start()
    running.until(lambda status: registered(status) == ENTRIES, "the new daemon to know them")
    assert cache.size == ENTRIES
    cache.close()


def registered(status: dict[str, Any]) -> int:
    return sum(row["entries"] for row in status["governor"]["devices"])


def test_a_key_has_one_owner_on_a_device(running: Daemon, card: FakeCard) -> None:
    vram = FakeVram(card)
    cache = tensord.DeviceCache(running.client(), vram)
    with started(running, card, 0) as other:
        before = governor(running)["devices"]
        refused = cache.put(key(0), {"a": vram.upload(values(0))}, wait=True)
        assert refused.state == "refused"
        assert isinstance(refused.error, OwnedElsewhere)
        assert cache.size == 0
        after = governor(running)["devices"]
        assert [row["bytes"] for row in after] == [row["bytes"] for row in before]
        other.kill()
        until(
            lambda: cache.put(key(0), {"a": vram.upload(values(0))}, wait=True).state == "registered", "it to be free"
        )
    cache.close()
