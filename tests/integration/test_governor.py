"""The governor whole: several processes' tensors on one card that fills and empties, a real daemon in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import DeviceFull
from tensord.ipc.messages.modes import Mode
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.device.card import (
    CARD,
    ENTRY_BYTES,
    TOTAL_BYTES,
    held,
    host_values,
    key,
    put_some,
    values,
    watching,
)
from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage

ENTRIES = 5


def engine(stage: Stage, socket: Path, folder: Path, first: int) -> None:
    """An engine's process: puts, and answers what it is asked."""
    vram = FakeVram(FakeCard(folder, CARD))
    vram.stream.delay_s = vram.copies.delay_s = 0.001
    cache = tensord.DeviceCache(tensord.Client(socket, name=f"engine-{first}", timeout_s=PATIENCE_S), vram)
    numbers = range(first, first + ENTRIES)
    stage.tell([put.state for put in put_some(cache, vram, numbers, tokens=10, agent=f"agent-{first}")])
    while True:
        match stage.hear():
            case "size":
                stage.tell(cache.size)
            case "error":
                stage.tell(repr(cache.error))
            case "blocked":
                put = cache.put(key(1000 + first), vram.upload(values(0)[:100]), wait=True)
                stage.tell((cache.is_blocked, put.state, type(put.error).__name__))
            case "all right":
                found = []
                for n in numbers:
                    with held(cache, key(n), promote=True) as lease:
                        found.append((lease.tier, np.array_equal(host_values(lease.tree), values(n))))
                stage.tell(found)
            case ("reserve", int(size_bytes)):
                try:
                    stage.tell(cache.reserve(size_bytes, for_s=30, wait_s=0).size_bytes)
                except DeviceFull:
                    stage.tell(0)


def started(daemon: Daemon, card: FakeCard, first: int) -> Child:
    child = Child(engine, daemon.socket, card.folder, first)
    assert child.hear() == ["registered"] * ENTRIES
    return child


def mode(daemon: Daemon) -> str:
    found: str = daemon.status()["governor"]["gauges"][0]["mode"]
    return found


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
                one.tell(("reserve", size_bytes))
                two.tell(("reserve", size_bytes))
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


def test_far_agents_entries_go_first_and_those_of_the_next_step_come_back(card: FakeCard) -> None:
    """Ten entries, of which only two have to go: both are of the agent that runs last."""
    graph = tensord.AgentStepGraph()
    graph.add_step(tensord.AgentStep("soon", step_index=1))
    graph.add_step(tensord.AgentStep("late", depends_on=("soon",), step_index=5))
    with watching(card) as daemon:
        vram = FakeVram(card)
        cache = tensord.DeviceCache(daemon.start().client(), vram)
        put_some(cache, vram, range(ENTRIES), tokens=10, agent="late")
        put_some(cache, vram, range(100, 100 + ENTRIES), tokens=10, agent="soon")
        with cache.client.workflow("pipeline", graph) as workflow:
            used_bytes, total_bytes = card.reading()
            occupied = int(0.85 * total_bytes) + ENTRY_BYTES + ENTRY_BYTES // 2 - used_bytes
            card.occupy(occupied)
            until(lambda: cache.size == 2 * ENTRIES - 2, "two to go")
            assert cache.mode is Mode.WORKFLOW_AWARE
            assert sum(cache.contains(key(n)) for n in range(ENTRIES)) == ENTRIES - 2
            card.occupy(occupied - 8 * ENTRY_BYTES)
            workflow.advance(4, wait=True)
            until(lambda: cache.size == 2 * ENTRIES, "the next step's entries to come back")
            for n in range(ENTRIES):
                with held(cache, key(n)) as lease:
                    assert lease.tier == "device"
                    assert np.array_equal(host_values(lease.tree), values(n))
            # The cache's thread counts a promotion once the entry is there.
            until(lambda: cache.tally.promoted == 2, "both to be counted")
        cache.close()
