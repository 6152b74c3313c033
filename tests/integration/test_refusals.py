"""Every limit that is reached is a typed error, or a miss, that names value, limit and remedy, and disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import tensord
from tensord.errors import LimitReached, ObjectTooLarge, StoreFull, TensordError
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import LAYOUT_VERSION

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..faults.payloads import is_payload, key, payload
from ..faults.raw import RawClient

LIMITS = "tensord.daemon.config.limits"
OTHERS = range(900, 904)


@contextmanager
def undisturbed(daemon: Daemon) -> Iterator[tensord.Client]:
    """Another client's entries are there before, and still there and right after, and it can still put."""
    other = daemon.client(name="other")
    for number in OTHERS:
        assert other.put(key(number), payload(number, 4096), wait=True).state == "stored"
    yield other
    assert other.connected
    for number in OTHERS:
        lease = other.get(key(number), verify=True)
        assert lease is not None and is_payload(lease.tree, number)
    assert other.put(key(999), payload(999, 4096), wait=True).state == "stored"


def refused(put: tensord.Put, kind: type[TensordError], *named: object) -> None:
    """The put was refused with an error of `kind` that names all of `named`."""
    assert put.wait(PATIENCE_S).state == "refused", put
    assert type(put.error) is kind, put.error
    for what in named:
        assert str(what) in str(put.error), f"{what} is not named: {put.error}"


# ---- size


def test_a_payload_larger_than_the_ring_is_refused() -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon, undisturbed(daemon.start()):
        client = daemon.client()
        data = payload(1, 3 * MIB)
        refused(client.put(key(1), data), ObjectTooLarge, "object_bytes_max", 2 * MIB, "3145", "raise it")
        with pytest.raises(ObjectTooLarge, match="object_bytes_max is 2097152"):
            client.reserve(tensord.Spec((3 * MIB,), "uint8"))
        # It fits the limit, but not with its header.
        refused(client.put(key(1), payload(1, 2 * MIB - 128)), ObjectTooLarge, 2 * MIB)
        with RawClient(daemon.socket, writes="in place") as raw:
            with pytest.raises(ObjectTooLarge, match="object_bytes_max is 2097152"):
                raw.borrow(3 * MIB)
            (place,) = raw.borrow(MIB)
            answer = raw.until_settled(raw.submit(key(1), place, (3 * MIB, 10)))
            assert answer is not None and answer.error is not None and "not lent to its client" in answer.error.text


def test_a_full_ring_with_everything_pinned_refuses_and_serves_again_when_a_lease_goes() -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon, undisturbed(daemon.start()):
        client = daemon.client()
        held = []
        for number in range(7):
            assert client.put(key(number), payload(number, 256 << 10), wait=True).state == "stored"
            held.append(client.get(key(number)))
        others = [client.get(key(number)) for number in OTHERS]
        # The fence and a scan or two: it is answered, and never waits for a reader.
        refused(
            client.put(key(50), payload(50, 256 << 10)),
            StoreFull,
            "(ring)",
            "largest_free_bytes",
            "pinned",
            "raise ring_bytes",
        )
        for number, lease in enumerate(held):
            assert lease is not None and is_payload(lease.tree, number)
        assert all(others)
        held.pop(3)
        del lease
        assert client.put(key(50), payload(50, 256 << 10), wait=True).state == "stored"
        assert daemon.store("found_corrupt") == 0


# ---- counts


def test_over_lanes_max_a_new_client_is_refused_and_a_client_with_a_lane_may_attach_again() -> None:
    with Daemon(limits_lanes_max=2) as daemon, undisturbed(daemon.start()) as other:
        client = daemon.client()
        for _ in range(3):
            with pytest.raises(LimitReached, match=r"lanes_max is 2.*raise it"):
                tensord.Client(daemon.socket, required=True)
        held = client.get(key(OTHERS[0]))
        daemon.restart()
        daemon.attached(client, other)
        assert held is not None and is_payload(held.tree, OTHERS[0])
        client.close()
        # Its lane is in being for as long as a view of it lives.
        with pytest.raises(LimitReached, match="lanes_max"):
            tensord.Client(daemon.socket, required=True)
        del held
        until(lambda: daemon.status()["lanes"] == 1, "the lane to go")
        daemon.client()


# ---- starting


def test_a_second_daemon_of_an_instance_is_refused_by_name_and_the_first_goes_on() -> None:
    with Daemon() as daemon, Daemon() as second:
        with undisturbed(daemon.start()):
            second.instance = daemon.instance
            told = second.refused()
            assert "InstanceBusy" in told and repr(daemon.instance) in told and "--instance" in told
        second.instance = "test-none-of-the-first's"  # what it leaves is not the first one's to remove


def test_a_ring_of_another_layout_version_is_freed_with_both_named() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        lease = client.get(key(1))
        daemon.terminate()
        index = next(path for path in daemon.segments() if path.name.endswith(".index"))
        with index.open("r+b") as file:
            file.seek(8)
            file.write((77).to_bytes(8, "little"))
        daemon.start()
        assert f"layout version 77, this release reads {LAYOUT_VERSION}" in daemon.log
        (notice,) = daemon.ask(messages.HealthQuery)["notices"]
        assert "version 77" in notice and "freed with its entries" in notice
        until(lambda: client.get(key(1)) is None, "it to see the new ring")
        assert client.wait_connected(PATIENCE_S)
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        assert lease is not None and is_payload(lease.tree, 1)
