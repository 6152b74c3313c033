"""What the crossings do not have of a view: the daemon gone with its memory, a ring replaced, and its parent dead."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import tensord

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, payload
from .small_ring import PINNED, overwrite, released


def test_a_view_outlives_the_daemon_and_its_memory(small: Daemon) -> None:
    client = small.client()
    lease = client.get(key(PINNED))
    small.interrupt()
    until(lambda: not client.connected, "the client to notice")
    assert not small.segments()
    assert lease is not None and is_payload(lease.tree, PINNED)
    again = client.get(key(PINNED))
    assert again is not None and is_payload(again.tree, PINNED), "lookups go on without a daemon"


def test_a_replaced_ring_stays_mapped_for_as_long_as_a_view_of_it_lives(small: Daemon) -> None:
    client = small.client()
    for number in range(3):
        assert client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S).state in ("stored", "existed")
        lease, ring = client.get(key(number)), client.ring()
        small.interrupt()
        small.start()
        until(lambda before=ring: client.connected and client.ring() is not before, "the new ring")  # type: ignore[misc]
        del ring
        assert _rings_mapped(small) == 2
        assert lease is not None and is_payload(lease.tree, number)
        del lease
        gc.collect()
        until(lambda: _rings_mapped(small) == 1, "the former ring to be unmapped")


def _rings_mapped(daemon: Daemon) -> int:
    """How many of a daemon's rings this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{daemon.instance}.ring" in line})


# ---- forks


def forks_and_dies(stage: Stage, socket: Path) -> None:
    """The forking process lets go of its view and ends; the one forked off keeps its own."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    lease = client.get(key(PINNED))
    assert lease is not None
    view = lease.tree
    del lease
    if os.fork():
        del view
        os._exit(0)
    stage.tell("forked")
    stage.hear()
    stage.tell(is_payload(view, PINNED))
    found = client.wait_connected(PATIENCE_S) and client.contains(key(PINNED))
    stage.tell(found)
    del view
    gc.collect()
    stage.hear()
    os._exit(0)


def test_a_view_stays_right_in_a_forked_process_after_its_parent_released_and_died(small: Daemon) -> None:
    with Child(forks_and_dies, small.socket) as child:
        assert child.hear() == "forked"
        child.wait()
        small.until(lambda s: s["lanes_orphaned"] == 1, "the parent's lane to be the child's alone")
        overwrite(small)
        child.tell()
        assert child.hear() is True, "the view is right"
        assert child.hear() is True, "the forked process has a connection of its own"
        small.until(lambda s: not s["pins"], "the last view's pin to go")
        child.tell()
    released(small)
