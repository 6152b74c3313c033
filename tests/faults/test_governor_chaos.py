"""Everything at once: owners that put, get, delete, stand still and die, while passes run on their card; and a ring
that shrinks and grows under its readers.

What comes back is what was put, to the bit; afterwards the daemon's account is that of the owners, and adds up.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tensord
from tensord.errors import DeviceFull, Unavailable
from tensord.ipc.messages import control as messages
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.device.card import CARD, filled, host_values, key, values, watching
from ..daemon_process import MIB, PATIENCE_S, SHM_FOLDER, Daemon, until
from ..processes import Child, Stage
from . import payloads
from .raw import RawClient

KEYS = 24
SHARES = (0.1, 0.75, 0.88, 0.94, 0.99)


def owner(stage: Stage, socket: Path, folder: Path, first: int, seed: int) -> None:
    """Does this and that with its keys until it is told to stop, in three threads."""
    vram = FakeVram(FakeCard(folder, CARD))
    vram.stream.delay_s = vram.copies.delay_s = 0.001
    cache = tensord.DeviceCache(tensord.Client(socket, name=f"owner-{first}", timeout_s=PATIENCE_S), vram)
    stop = threading.Event()
    wrong: list[str] = []
    counts = {"put": 0, "got": 0, "host": 0}

    def some(thread: int) -> None:
        chance = random.Random(f"{seed}-{thread}")
        held: list[tensord.DeviceLease] = []
        while not stop.wait(0.001):
            n = first + chance.randrange(KEYS)
            what = chance.random()
            try:
                if what < 0.45:
                    cache.put(key(n), {"a": vram.upload(values(n)), "n": n}, tokens=chance.choice((0, 10)))
                    counts["put"] += 1
                elif what < 0.9:
                    lease = cache.get(key(n), promote=chance.random() < 0.5)
                    if lease is not None:
                        counts["got"] += 1
                        counts["host"] += lease.tier == "host"
                        if not np.array_equal(host_values(lease.tree), values(n)) or lease.tree["n"] != n:
                            wrong.append(f"{n} on {lease.tier}")
                        held.append(lease)
                        if len(held) > 3:
                            held.pop(chance.randrange(3)).release()
                elif what < 0.97:
                    cache.delete(key(n))
                else:
                    cache.clear()
            except DeviceFull:
                pass
            except Exception as error:
                wrong.append(repr(error))
        for lease in held:
            lease.release()

    threads = [threading.Thread(target=some, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    stage.tell("going")
    stage.hear()
    stop.set()
    for thread in threads:
        thread.join()
    stage.tell((wrong, counts))
    while True:
        stage.hear()
        cache._entries.check_invariants()
        stage.tell((cache.size, cache.size_bytes, cache.total_tokens))


def governor(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["governor"]
    return found


def assert_adds_up(state: dict[str, Any]) -> None:
    counted = state["counters"]
    resident = sum(row["entries"] for row in state["devices"])
    gone = sum(counted[name] for name in ("offloaded", "dropped", "released", "gone_with_owner"))
    assert counted["registered"] == resident + gone, counted
    assert sum(row["entries"] for row in state["owners"]) == resident
    assert sum(row["bytes"] for row in state["owners"]) == sum(row["bytes"] for row in state["devices"])


def played(card: FakeCard, seed: int, turns: int, *, also: Any = lambda turn: None) -> None:
    """The card fills and empties."""
    chance = random.Random(seed)
    pause = threading.Event()
    for turn in range(turns):
        with suppress(DeviceFull):  # an owner was quicker
            filled(card, chance.choice(SHARES))
        also(turn)
        pause.wait(chance.choice((0.03, 0.1, 0.2)))
    card.occupy(0)


def agree(daemon: Daemon, children: list[Child]) -> None:
    """Waits until the daemon's account is that of the owners."""

    def same() -> bool:
        found = []
        for child in children:
            child.tell("count")
            found.append(child.hear())
        state = governor(daemon)
        assert_adds_up(state)
        if not state["devices"]:
            return False  # no owner is attached to the next daemon yet
        (device,) = state["devices"]
        mine = tuple(map(sum, zip(*found, strict=True)))
        last[:] = [mine, device]
        return mine == (device["entries"], device["bytes"], device["tokens"]) and not device["ordered_entries"]

    last: list[Any] = []
    try:
        until(same, "owners and daemon to agree")
    except AssertionError as error:
        raise AssertionError(f"{error}: {last}") from error


def test_owners_and_daemons_killed_or_stopped_at_any_time_agree_in_the_end(card: FakeCard) -> None:
    """Killed in the middle of what they do, stopped for longer than an order may take, reconfigured, restarted."""
    graph = tensord.AgentStepGraph()
    graph.add_step(tensord.AgentStep("agent", step_index=1))
    with watching(card, pressure_ack_s="200ms", ring_bytes="4MiB") as daemon, ExitStack() as stack:
        daemon.start()

        def started(first: int, seed: int) -> Child:
            child = stack.enter_context(Child(owner, daemon.socket, card.folder, first, seed))
            assert child.hear() == "going"
            return child

        children = [started(100 * n, n) for n in range(3)]
        modes: list[tensord.ModeChange] = []
        listening = daemon.client(name="listening")
        listening.on_mode(modes.append)
        workflow = listening.workflow("w", graph)

        def also(turn: int) -> None:
            match turn % 6:
                case 1:
                    # Nobody here touches the card meanwhile: who is stopped may hold its lock.
                    children[1].pause()
                    threading.Event().wait(0.5)
                    children[1].resume()
                case 4:
                    os.kill(daemon.pid, signal.SIGHUP)
                case 5:
                    children[2].kill()
                    children[2] = started(200, turn)
            if turn in (8, 14):
                assert_adds_up(governor(daemon))
                daemon.kill() if turn == 8 else daemon.terminate()
                daemon.start()

        played(card, 3, 18, also=also)
        for child in children:
            child.tell("stop")
        for child in children:
            wrong, _ = child.hear()
            assert not wrong
        daemon.until(
            lambda status: [row["refuses"] for row in status["governor"]["gauges"]] == [False], "the emergency to end"
        )
        agree(daemon, children)
        # An owner that was late answers once its turn has come: on a busy machine only now.
        daemon.until(
            lambda status: not any(row["unresponsive"] for row in status["governor"]["owners"]), "all owners to answer"
        )
        # The client of the workflow may have attached to the last daemon only now.
        daemon.until(
            lambda status: [row["workflow"] for row in status["governor"]["workflows"]] == ["w"], "the workflow"
        )
        assert workflow.error is None
        for child in children:
            child.kill()
        daemon.until(lambda status: not status["governor"]["owners"], "all to be gone")
        state = governor(daemon)
        assert_adds_up(state)
        assert (state["devices"], state["reservations"], state["remembered"]) == ([], 0, 0)
        before = len(modes)
        filled(card, 0.99)
        until(lambda: any(change.refuses for change in modes[before:]), "whoever listens to hear of the next mode")
        assert "Traceback" not in daemon.log


RING_BYTES = 16 * MIB


def reader(stage: Stage, socket: Path) -> None:
    """Puts and reads, and holds views for a while, until it is told to stop."""
    client = tensord.Client(socket, name="reader", timeout_s=PATIENCE_S)
    stop = threading.Event()
    wrong: list[object] = []
    counts = {"stored": 0, "read": 0, "refused": 0}

    def some(seed: int) -> None:
        chance = random.Random(f"{os.getpid()}-{seed}")
        held: list[tuple[int, tensord.Lease]] = []
        while not stop.wait(0.001):
            n = chance.randrange(80)
            try:
                if chance.random() < 0.5:
                    put = client.put(payloads.key(n), payloads.payload(n, 1000 * (n * 37 % 700 + 1)), wait=True)
                    counts["stored" if put.state in ("stored", "existed") else "refused"] += 1
                    continue
                lease = client.get(payloads.key(n))
                if lease is not None:
                    counts["read"] += 1
                    held.append((n, lease))
                if len(held) > 4:
                    n, lease = held.pop(chance.randrange(4))
                    if not payloads.is_payload(lease.tree, n):
                        wrong.append(n)
                    lease.release()
            except Unavailable:
                pass
            except Exception as error:
                wrong.append(repr(error))
        for n, lease in held:
            if not payloads.is_payload(lease.tree, n):
                wrong.append(n)
            lease.release()

    threads = [threading.Thread(target=some, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    stage.tell("going")
    stage.hear()
    stop.set()
    for thread in threads:
        thread.join()
    stage.tell((wrong, counts))
    stage.hear()


def drill(number: int, used_bytes: int) -> messages.Drill:
    return messages.Drill(number, "host", used_bytes, 100 * MIB, True)


def ring_bytes(daemon: Daemon) -> int:
    """What the ring takes of the machine's memory, as the kernel counts it."""
    return (SHM_FOLDER / f"tensord.{daemon.instance}.ring").stat().st_blocks * 512


def test_a_ring_that_shrinks_and_grows_all_the_time_harms_nobody_and_is_whole_at_the_end(tmp_path: Path) -> None:
    """By hand, by the host's gauge, by a drill, by all of them; with a daemon that is killed meanwhile."""
    gauge = tmp_path / "gauge"

    def shows(share: float) -> None:
        (tmp_path / "new").write_text(f"host {share:.0%} 100MiB\n")
        (tmp_path / "new").rename(gauge)

    shows(0.1)
    chance = random.Random(5)
    pause = threading.Event()
    flags = {"gauges_host": "file", "gauges_device": "none", "gauges_file": gauge, "pressure_critical_idle_s": "50ms"}
    flags |= {"gauges_sample_s": "30ms", "gauges_sample_pressed_s": "30ms", "ring_bytes": RING_BYTES}
    with Daemon(**flags) as daemon, Child(reader, daemon.start().socket) as one, Child(reader, daemon.socket) as two:
        for child in (one, two):
            assert child.hear() == "going"
        lowest = RING_BYTES
        for turn in range(60):
            if turn in (25, 45):
                daemon.kill() if turn == 25 else daemon.terminate()
                daemon.start()
            with RawClient(daemon.socket, attach=False) as operator:
                what = chance.random()
                if what < 0.4:
                    operator.ask(lambda n: messages.Limit(n, chance.choice((1, 2, 3, 5, 8, 16, 64)) * MIB))
                elif what < 0.8:
                    shows(chance.choice((0.1, 0.5, 0.75, 0.86, 0.9, 0.94, 0.97, 0.99)))
                else:
                    used_bytes = chance.choice((30, 90, 99)) * MIB
                    operator.ask(partial(drill, used_bytes=used_bytes))
                pause.wait(chance.choice((0.0, 0.02, 0.1)))
            lowest = min(lowest, ring_bytes(daemon))
        shows(0.99)
        daemon.until(lambda s: s["governor"]["gauges"] and s["governor"]["gauges"][0]["refuses"], "the emergency")
        until(lambda: min(lowest, ring_bytes(daemon)) < RING_BYTES // 2, "pages to be given back")
        shows(0.1)
        with RawClient(daemon.socket, attach=False) as operator:
            operator.ask(lambda n: messages.Limit(n, RING_BYTES))
        last: list[Any] = []

        def whole(status: dict[str, Any]) -> bool:
            last[:] = [status["store"], status["governor"]["host"], status["governor"]["gauges"]]
            return (
                status["store"]["resident_bytes"] == RING_BYTES
                and status["governor"]["host"]["resident_bytes_max"] is None
                and not status["governor"]["gauges"][0]["refuses"]
            )

        try:
            daemon.until(whole, "the ring to be whole")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from error
        assert ring_bytes(daemon) >= RING_BYTES
        for child in (one, two):
            child.tell("stop")
            wrong, counts = child.hear()
            assert not wrong
            assert counts["stored"] and counts["read"]
        store = daemon.status()["store"]
        assert not store["found_corrupt"]
        client = daemon.client()
        put = client.put(payloads.key(1000), payloads.payload(1000, 8 * MIB), wait=True)
        assert put.state == "stored", put
        until(lambda: daemon.ask(messages.HealthQuery)["healthy"], "no problem to be left")
        assert "Traceback" not in daemon.log
