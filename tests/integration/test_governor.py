"""The governor whole: several processes' tensors on one card, and what they reserve of it, a real daemon in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.errors import DeviceFull
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.device.card import CARD, ENTRY_BYTES, TOTAL_BYTES, put_some, watching
from ..daemon_process import PATIENCE_S, Daemon
from ..processes import Child, Stage

ENTRIES = 5


def engine(stage: Stage, socket: Path, folder: Path, first: int) -> None:
    """An engine's process: puts, and reserves what it is asked to."""
    vram = FakeVram(FakeCard(folder, CARD))
    cache = tensord.DeviceCache(tensord.Client(socket, name=f"engine-{first}", timeout_s=PATIENCE_S), vram)
    stage.tell([put.state for put in put_some(cache, vram, range(first, first + ENTRIES))])
    while True:
        size_bytes = stage.hear()
        try:
            stage.tell(cache.client.reserve_device(CARD, size_bytes, for_s=30, wait_s=0).size_bytes)
        except DeviceFull:
            stage.tell(0)


def started(daemon: Daemon, card: FakeCard, first: int) -> Child:
    child = Child(engine, daemon.socket, card.folder, first)
    assert child.hear() == ["registered"] * ENTRIES
    return child


def test_a_killed_owner_s_entries_end_and_other_owners_keep_theirs(card: FakeCard) -> None:
    with watching(card) as daemon:
        daemon.start()
        with started(daemon, card, 0) as killed, started(daemon, card, 100):
            killed.kill()
            daemon.until(
                lambda status: status["governor"]["counters"]["gone_with_owner"] == ENTRIES, "the daemon to count them"
            )
            assert [(row["name"], row["entries"]) for row in daemon.status()["governor"]["owners"]] == [
                ("engine-100", ENTRIES)
            ]
            assert card.refresh()[0] == ENTRIES * ENTRY_BYTES


def test_two_processes_never_reserve_more_together_than_was_free(card: FakeCard) -> None:
    with watching(card) as daemon:
        daemon.start()
        with started(daemon, card, 0) as one, started(daemon, card, 100) as two:
            used_bytes = card.reading()[0]
            daemon.until(
                lambda status: [row["used_bytes"] for row in status["governor"]["gauges"]] == [used_bytes], "the gauge"
            )
            free_bytes = TOTAL_BYTES - used_bytes
            size_bytes = free_bytes // 5 + 1
            for _ in range(4):
                one.tell(size_bytes)
                two.tell(size_bytes)
            got = [child.hear() for child in (one, two) for _ in range(4)]
            assert sum(got) == 4 * size_bytes <= free_bytes


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_what_a_client_has_reserved_stays_its_own_with_the_next_daemon(card: FakeCard, end: str) -> None:
    with watching(card) as daemon:
        holder, other = daemon.start().client(name="holder"), daemon.client(name="other")
        daemon.until(lambda status: bool(status["governor"]["gauges"]), "the gauge")
        most, more = TOTAL_BYTES * 3 // 4, TOTAL_BYTES // 2
        with holder.reserve_device(CARD, most) as kept:
            over = holder.reserve_device(CARD, 1000)
            over.release()
            forgotten = holder.reserve_device(CARD, 2000)
            del forgotten
            (daemon.kill if end == "kill" else daemon.terminate)()
            daemon.start()
            daemon.attached(other)
            daemon.until(lambda status: bool(status["governor"]["gauges"]), "the gauge")
            with pytest.raises(DeviceFull):
                other.reserve_device(CARD, more, wait_s=0)
            daemon.attached(holder)
            daemon.until(lambda status: reserved_bytes(status) == most, "what is held to be said again")
            rest = other.reserve_device(CARD, TOTAL_BYTES - most, wait_s=PATIENCE_S)
            with rest, pytest.raises(DeviceFull):
                other.reserve_device(CARD, 1, wait_s=0)
            assert 0 < kept.left_s <= kept.lasts_s
        with other.reserve_device(CARD, TOTAL_BYTES, wait_s=PATIENCE_S):
            pass
        assert kept.left_s == 0


def reserved_bytes(status: dict[str, Any]) -> int:
    return sum(row["reserved_bytes"] for row in status["governor"]["devices"])
