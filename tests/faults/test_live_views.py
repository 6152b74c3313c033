"""A live view stays right, whatever becomes of its client's connection, its client, its process or the daemon.

Each test then has the ring overwritten a hundred times, which leaves nothing of an entry that nobody pins.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, lap, payload
from .small_ring import PINNED, RING_BYTES, UNPINNED, overwrite, released


def shut_socket(daemon: Daemon, client: tensord.Client) -> None:
    before = client._link.attachment.channel
    assert before is not None
    before._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: client.connected and client._link.attachment.channel is not before, "the client to attach again")


def say_something_hostile(daemon: Daemon, client: tensord.Client) -> None:
    before = client._link.attachment.channel
    assert before is not None
    before._sock.send(b"\xc1 is no msgpack")
    until(lambda: client.connected and client._link.attachment.channel is not before, "the client to attach again")


def close_client(daemon: Daemon, client: tensord.Client) -> None:
    client.close()
    daemon.until(lambda s: s["clients"] == 0, "the client to be gone")


def close_and_open_another(daemon: Daemon, client: tensord.Client) -> None:
    client.close()
    assert daemon.client().contains(key(PINNED))


def kill_daemon(daemon: Daemon, client: tensord.Client) -> None:
    daemon.kill()
    daemon.start()
    daemon.attached(client)


def stop_daemon(daemon: Daemon, client: tensord.Client) -> None:
    daemon.restart()
    daemon.attached(client)


def restart_while_closed(daemon: Daemon, client: tensord.Client) -> None:
    client.close()
    daemon.kill()
    daemon.start()


def daemon_drops_its_memory(daemon: Daemon, client: tensord.Client) -> None:
    """The daemon goes with all of its memory, and another of the same name begins with none."""
    daemon.interrupt()
    assert not daemon.segments()
    daemon.start()
    writer = daemon.client()
    assert writer.put(key(UNPINNED), payload(UNPINNED), wait=True).state == "stored"


Event = Callable[[Daemon, tensord.Client], None]
EVENTS: list[Event] = [
    shut_socket,
    say_something_hostile,
    close_client,
    close_and_open_another,
    kill_daemon,
    stop_daemon,
    restart_while_closed,
    daemon_drops_its_memory,
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_view_stays_right(small: Daemon, event: Event) -> None:
    client = small.client()
    lease = client.get(key(PINNED))
    assert lease is not None
    view = lease.tree[5:]
    del lease
    event(small, client)
    overwrite(small)
    assert is_payload(view.base, PINNED)
    del view
    released(small)


def test_views_taken_before_and_after_a_lost_connection_are_both_right(small: Daemon) -> None:
    client = small.client()
    before = client.get(key(PINNED))
    shut_socket(small, client)
    after = client.get(key(PINNED))
    assert before is not None and after is not None
    before.release()
    overwrite(small)
    assert is_payload(after.tree, PINNED)
    del after
    released(small)


def test_a_batch_stays_right_when_the_client_is_closed(small: Daemon) -> None:
    client = small.client()
    batch = client.get_many([key(PINNED), key(77)])
    close_client(small, client)
    overwrite(small)
    lease = batch[0]
    assert lease is not None and is_payload(lease.tree, PINNED)
    batch.release()
    overwrite_again = small.client()
    lap(overwrite_again, RING_BYTES, laps=3)
    assert is_payload(lease.tree, PINNED), "a lease taken from a batch outlives it"
    del lease, batch
    released(small)


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


def test_lookups_go_on_while_the_daemon_is_gone_and_after_its_restart(small: Daemon) -> None:
    client = small.client()
    small.kill()
    until(lambda: not client.connected, "the client to notice")
    lease = client.get(key(PINNED))
    assert lease is not None and is_payload(lease.tree, PINNED)
    small.start()
    small.attached(client)
    small.until(lambda s: s["pins"] == 1, "the pin taken meanwhile to be seen")
    overwrite(small)
    assert is_payload(lease.tree, PINNED)
    del lease
    released(small)


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


def forks_and_stays(stage: Stage, socket: Path) -> None:
    """The process forked off lets go of its view and ends; the forking one keeps its own."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    lease = client.get(key(PINNED))
    assert lease is not None
    view = lease.tree
    del lease
    forked = os.fork()
    if not forked:
        del view
        gc.collect()
        os._exit(0)
    os.waitpid(forked, 0)
    assert client.wait_connected(PATIENCE_S)
    mine = client.get(key(PINNED))
    assert mine is not None
    mine.release()
    stage.tell("forked")
    stage.hear()
    stage.tell(is_payload(view, PINNED))
    del view
    gc.collect()
    stage.hear()


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


def test_a_view_stays_right_after_a_forked_process_released_its_own(small: Daemon) -> None:
    with Child(forks_and_stays, small.socket) as child:
        assert child.hear() == "forked"
        overwrite(small)
        child.tell()
        assert child.hear() is True
        small.until(lambda s: not s["pins"], "the pin to go with the last view")
        child.tell()
        child.wait()
    released(small)


def forks_without_views(stage: Stage, socket: Path) -> None:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    assert client.contains(key(PINNED))
    lane = client._link.view.lane.lane_id if client._link.view else 0
    forked = os.fork()
    if not forked:
        mine = client.get(key(PINNED))
        while mine is None:
            client.wait_connected(PATIENCE_S)
            mine = client.get(key(PINNED))
        view = mine.tree
        stage.tell("held by the forked process")
        stage.hear()
        stage.tell(is_payload(view, PINNED))
        os._exit(0)
    os.waitpid(forked, 0)
    kept = client._link.view is not None and client._link.view.lane.lane_id == lane
    stage.tell((kept, client.get(key(PINNED)) is not None, client.put(key(3), payload(3), wait=True).state))


def test_a_fork_without_views_leaves_the_parent_as_it_was_and_attaches_the_child_anew(small: Daemon) -> None:
    with Child(forks_without_views, small.socket) as child:
        assert child.hear() == "held by the forked process"
        small.until(lambda s: s["lanes"] == 2, "a lane for each side")
        overwrite(small)
        child.tell()
        assert child.hear() is True
        assert child.hear() == (True, True, "stored")
        child.wait()
    released(small)


def forks_while_putting(stage: Stage, socket: Path) -> None:
    """A put on its way in the parent, while it forks: the parent's; the child puts on its own."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    reserved = client.reserve(tensord.Spec((1024,), "uint64"))
    put = client.put(key(10), payload(10, MIB // 2))
    forked = os.fork()
    if not forked:
        mine = client.put(key(11), payload(11), wait=True)
        os._exit(0 if (put.state, mine.state) in (("lost", "stored"), ("stored", "stored")) else 1)
    _, status = os.waitpid(forked, 0)
    reserved.tree[:] = payload(12, 8192)
    stage.tell((status, put.wait(PATIENCE_S).state, reserved.commit(key(12), wait=True).state))


def test_a_fork_in_the_middle_of_a_put_disturbs_neither_side(small: Daemon) -> None:
    with Child(forks_while_putting, small.socket) as child:
        assert child.hear() == (0, "stored", "stored")
    reader = small.client()
    for number in (10, 11, 12):
        lease = reader.get(key(number), verify=True)
        assert lease is not None and is_payload(lease.tree, number)
