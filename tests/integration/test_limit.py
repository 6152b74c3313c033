"""A ring that shrinks gives its pages back, takes them again when it may, and harms nothing that stays."""

from __future__ import annotations

import os

import tensord
from tensord.ipc.messages import control as messages
from tensord.shm.ring import segments

from ..daemon_process import MIB, Daemon, until
from ..faults.payloads import is_payload, key, payload
from ..faults.raw import RawClient

RING_BYTES = 16 * MIB
ENTRY_BYTES = 300_000


def limit(daemon: Daemon, limit_bytes: int) -> None:
    """`tensorctl limit`."""
    with RawClient(daemon.socket, attach=False) as operator:
        answer = operator.ask(lambda number: messages.Limit(number, limit_bytes))
    assert answer.after_bytes == min(limit_bytes, RING_BYTES)


def allocated_bytes(daemon: Daemon) -> int:
    """What the ring takes of the machine's memory, as the kernel counts it."""
    return os.stat(segments.SHM_FOLDER / f"tensord.{daemon.instance}.ring").st_blocks * 512


def grown(daemon: Daemon) -> None:
    until(lambda: allocated_bytes(daemon) >= RING_BYTES, "the whole ring in memory")
    daemon.until(lambda status: status["store"]["resident_bytes"] == RING_BYTES, "a store that knows it")


def fill(client: tensord.Client, first: int, count: int) -> None:
    for number in range(first, first + count):
        assert client.put(key(number), payload(number, ENTRY_BYTES), wait=True).state == "stored"


def test_views_held_while_the_ring_shrinks_stay_what_they_were(daemon: Daemon) -> None:
    client = daemon.client()
    grown(daemon)
    fill(client, 0, 40)
    held = {number: client.get(key(number)) for number in range(0, 40, 5)}
    limit(daemon, 3 * MIB)
    until(lambda: allocated_bytes(daemon) <= 3 * MIB, "pages given back beside what is held")
    fill(client, 100, 20)
    for number, lease in held.items():
        assert lease is not None and is_payload(lease.tree, number)
    del lease
    held.clear()
    limit(daemon, MIB)
    until(lambda: allocated_bytes(daemon) <= MIB, "what was held has gone too")


def test_a_client_sees_that_pages_went_before_anything_lies_in_new_ones(daemon: Daemon) -> None:
    """A GPU's driver that has registered the ring keeps the pages that went."""
    client = daemon.client()
    grown(daemon)
    fill(client, 0, 40)
    view = client.link.view
    assert view is not None
    ring = view._ring
    counted = ring.punches
    assert counted > 0 and ring.is_resident(0, RING_BYTES)
    fill(client, 100, 40)
    assert ring.punches == counted, "pages that are used again are the same pages"
    limit(daemon, 4 * MIB)
    daemon.until(lambda status: status["store"]["resident_bytes"] <= 4 * MIB, "pages given back")
    assert ring.punches > counted and not ring.is_resident(0, RING_BYTES)
    counted = ring.punches
    limit(daemon, RING_BYTES)
    grown(daemon)
    fill(client, 200, 80)
    assert ring.punches == counted and ring.is_resident(0, 4 * MIB)
    daemon.kill()
    daemon.start()
    until(lambda: ring.punches > counted, "the next daemon counts its start")
