"""Large payloads go into the ring in one copy, which the client makes; everything that other paths promise holds."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ExitStack
from mmap import mmap
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.core import in_place, puts, ring_writer, spans
from tensord.client.core.put import Pending
from tensord.client.core.ring_writer import RingWriter
from tensord.errors import DaemonUnavailable, LimitReached, TensordError
from tensord.ipc import messages
from tensord.shm import segments
from tensord.shm.lanes import Lane
from tensord.shm.layout import PAGE_BYTES

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..faults.payloads import is_payload, payload
from ..faults.payloads import key as payload_key
from ..faults.raw import RawClient
from ..memory_bench import key

RING_BYTES = 64 * MIB
IN_PLACE_BYTES = 1 * MIB


@pytest.fixture(autouse=True)
def _small_payloads_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puts, "IN_PLACE_BYTES", IN_PLACE_BYTES)


def picture(seed: int, size_bytes: int = 2 * IN_PLACE_BYTES) -> Any:
    return {"pixels": np.random.default_rng(seed).integers(0, 255, size_bytes, np.uint8), "seed": seed}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the payloads that this process writes in place. No busy machine sends one through the inbox."""
    monkeypatch.setattr(in_place, "SPAN_S_MAX", PATIENCE_S)
    monkeypatch.setattr(in_place, "_OPEN_S", PATIENCE_S)
    # Puts follow each other closely enough for spans to be taken in advance, which stay.
    monkeypatch.setattr(spans, "UNUSED_S", PATIENCE_S)
    sizes: list[int] = []
    write = RingWriter.write

    def counted(writer: RingWriter, payload: Any, offset: int) -> bytes:
        sizes.append(payload.payload_bytes)
        return write(writer, payload, offset)

    monkeypatch.setattr(RingWriter, "write", counted)
    return sizes


def test_a_large_payload_needs_no_inbox_and_reads_back_verified(written: list[int]) -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        for number in range(20):
            assert client.put(key(number), picture(number, 16 * MIB // 4), wait=True).state == "stored"
        lease = client.get(key(19), verify=True)
        assert lease is not None
        assert np.array_equal(lease.tree["pixels"], picture(19, 16 * MIB // 4)["pixels"])
        assert len(written) == 20
        assert daemon.status()["inboxes_bytes"] == 0
        with pytest.raises(ValueError, match="read-only"):
            lease.tree["pixels"][0] = 1


def test_a_small_payload_goes_through_the_inbox(written: list[int]) -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        assert client.put(key(1), np.zeros(IN_PLACE_BYTES - 4096, np.uint8), wait=True).state == "stored"
        assert not written
        assert daemon.status()["inboxes_bytes"] > 0


def test_write_in_place_off_makes_every_payload_go_through_the_inbox(written: list[int]) -> None:
    with (
        Daemon(ring_bytes=RING_BYTES, write_in_place="off") as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        assert not written
        with RawClient(daemon.socket) as raw, pytest.raises(LimitReached, match="write_in_place is off"):
            raw.ask(messages.OpenRing)


def test_a_payload_that_does_not_lie_in_one_piece_is_written_in_place_too(written: list[int]) -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        grid = np.random.default_rng(3).random((700, 900))
        tree: dict[str, Any] = {
            "odd": grid[::-1, ::3],
            "turned": grid.T,
            "empty": grid[:0],
            "text": "x" * 5000,
            "rest": [grid[5]],
        }
        assert client.put(key(1), tree, wait=True).state == "stored"
        assert written
        lease = client.get(key(1), verify=True)
        assert lease is not None
        for name in ("odd", "turned", "empty"):
            assert np.array_equal(lease.tree[name], tree[name])
        assert lease.tree["text"] == tree["text"]


def test_a_payload_that_changes_while_it_is_put_still_agrees_with_its_checksum() -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        array = np.zeros(8 * MIB, np.uint8)
        done = threading.Event()

        def change() -> None:
            while not done.is_set():
                array[:] += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for number in range(10):
                assert client.put(key(number), array, wait=True, timeout_s=PATIENCE_S).state == "stored"
                assert client.get(key(number), verify=True) is not None
        finally:
            done.set()
            thread.join()


def test_a_put_to_a_stopped_daemon_returns_and_is_stored_later() -> None:
    with (
        Daemon(ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        daemon.pause()
        try:
            puts = [client.put(key(number), picture(number)) for number in (2, 3)]
            assert [put.state for put in puts] == ["sent", "sent"], puts
        finally:
            daemon.resume()
        for put in puts:
            assert put.wait(PATIENCE_S).state == "stored"
            assert client.get(put.key, verify=True) is not None
        daemon.until(lambda s: s["store"]["puts_in_flight"] == 0, "the span that came too late to be given up")


def test_a_put_that_waited_too_long_for_a_span_goes_through_the_inbox_and_asks_for_none() -> None:
    with (
        Daemon(ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        in_place = client.link.puts._in_place
        assert in_place is not None
        daemon.pause()
        try:
            put = client.put(key(2), picture(2, 3 * IN_PLACE_BYTES))
            assert not in_place.spans._asked
        finally:
            daemon.resume()
        assert put.wait(PATIENCE_S).state == "stored"
        assert not in_place.spans._given, "a span that came too late was kept"


def test_puts_after_one_that_waited_too_long_are_written_in_place_as_soon_as_a_span_comes(
    monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    monkeypatch.setattr(in_place, "_AGAIN_S", 10 * PATIENCE_S)
    with (
        Daemon(ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        daemon.pause()
        try:
            with monkeypatch.context() as impatient:
                impatient.setattr(in_place, "SPAN_S_MAX", 0.01)
                late = client.put(key(2), picture(2, 3 * IN_PLACE_BYTES))
        finally:
            daemon.resume()
        assert late.wait(PATIENCE_S).state == "stored"
        written.clear()
        numbers = iter(range(3, 50))
        while not written:
            number = next(numbers)
            assert client.put(key(number), picture(number, 3 * IN_PLACE_BYTES), wait=True).state == "stored"


def test_a_payload_written_in_place_stays_pinned_until_the_daemon_has_answered(written: list[int]) -> None:
    with (
        Daemon(ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        for number in range(3):
            assert client.put(key(number), picture(number), wait=True).state == "stored"
        in_place = client.link.puts._in_place
        assert in_place is not None
        view = in_place._view()
        assert view is not None
        until(lambda: in_place.spans._given, "a span for the next put")
        daemon.pause()
        try:
            put = client.put(key(3), picture(3))
            assert len(written) == 4
            assert view.lane.in_use == 1
        finally:
            daemon.resume()
        assert put.wait(PATIENCE_S).state == "stored"
        assert view.lane.in_use == 0


def test_a_put_whose_commit_meets_a_broken_connection_is_lost_and_keeps_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Daemon(ring_bytes=RING_BYTES) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
        ExitStack() as held,
    ):
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        in_place, in_flight = client.link.puts._in_place, client.link.puts.in_flight
        assert in_place is not None
        send, not_sent = in_place._send, in_flight.not_sent

        def cut_off(*sent: messages.Message, connected: object) -> None:
            if not isinstance(sent[0], messages.Commit):
                send(*sent, connected=connected)
                return
            # Until it is known that the Commit was not sent, the connection's thread does not settle the put.
            held.enter_context(in_flight._lock)
            daemon.kill()
            try:
                raise BrokenPipeError
            except OSError as error:
                raise DaemonUnavailable("the daemon is gone") from error

        def settled(pending: Pending, error: TensordError) -> None:
            not_sent(pending, error)
            held.close()

        monkeypatch.setattr(in_place, "_send", cut_off)
        monkeypatch.setattr(in_flight, "not_sent", settled)
        gc.disable()
        try:
            put = client.put(key(2), picture(2))
            monkeypatch.setattr(in_place, "_send", send)
            daemon.start()
            assert put.wait(PATIENCE_S).state == "lost"
            assert client.wait_connected(PATIENCE_S)
            until(lambda: not client.status()["store"]["retired_bytes"], "the span is free, though the put is kept")
        finally:
            gc.enable()


def test_a_child_of_a_fork_cannot_write_the_ring_of_its_parent() -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        in_place = client.link.puts._in_place
        assert in_place is not None
        writer = in_place._writer
        assert writer is not None
        pid = os.fork()
        if not pid:
            writer._ring[:] = 0xBD
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        lease = client.get(key(1), verify=True)
        assert lease is not None
        assert np.array_equal(lease.tree["pixels"], picture(1)["pixels"])


def test_a_full_lane_leaves_puts_to_the_inbox(written: list[int]) -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        assert client.put(key(1), picture(1), wait=True).state == "stored"
        views = [client.get(key(1)) for _ in range(4096)]
        assert client.put(key(2), picture(2), wait=True, timeout_s=PATIENCE_S).state == "stored"
        assert len(written) == 1
        views.clear()
        assert client.put(key(3), picture(3), wait=True).state == "stored"
        assert len(written) == 2
        assert client.get(key(2), verify=True) is not None


def test_the_same_key_put_by_many_at_once_is_stored_once() -> None:
    with Daemon(ring_bytes=RING_BYTES) as daemon:
        daemon.start()
        clients = [tensord.Client(daemon.socket, timeout_s=PATIENCE_S) for _ in range(4)]
        states: list[str] = []

        def put(client: tensord.Client) -> None:
            puts = (client.put(key(n), picture(n), wait=True, timeout_s=PATIENCE_S) for n in range(8))
            states.extend(put.state for put in puts)

        threads = [threading.Thread(target=put, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(states) == ["existed"] * 24 + ["stored"] * 8
        for number in range(8):
            assert clients[0].get(key(number), verify=True) is not None
        daemon.until(lambda s: not s["pins"] and not s["store"]["puts_in_flight"], "nothing to be left")
        for client in clients:
            client.close()


def test_a_refused_payload_is_refused_before_it_is_copied(written: list[int]) -> None:
    with (
        Daemon(ring_bytes=RING_BYTES, limits_object_bytes_max=4 * MIB) as daemon,
        tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client,
    ):
        put = client.put(key(1), picture(1, 5 * MIB), wait=True)
        assert (put.state, type(put.error).__name__) == ("refused", "ObjectTooLarge")
        assert not written


def test_a_payload_of_1_mib_is_written_in_place_by_default(monkeypatch: pytest.MonkeyPatch, written: list[int]) -> None:
    monkeypatch.setattr(puts, "IN_PLACE_BYTES", ring_writer.IN_PLACE_BYTES)
    with Daemon(ring_bytes=RING_BYTES) as daemon, tensord.Client(daemon.start().socket, timeout_s=PATIENCE_S) as client:
        assert client.put(key(1), np.ones(MIB, np.uint8), wait=True).state == "stored"
        assert daemon.status()["inboxes_bytes"] == 0
        assert client.put(key(2), np.ones(MIB - 4096, np.uint8), wait=True).state == "stored"
        assert daemon.status()["inboxes_bytes"] > 0
        assert len(written) == 1


def test_the_next_daemon_gives_nobody_the_pages_of_a_span_that_is_not_written_yet() -> None:
    ring_bytes = 4 * MIB
    with (
        Daemon(ring_bytes=ring_bytes, policy="lru") as daemon,
        RawClient(daemon.start().socket) as raw,
    ):
        raw.ask(messages.OpenRing)
        *_, lane_fd, ring_fd = raw.fds
        placed = raw.ask(lambda number: messages.TakeSpan(number, MIB))
        lane, pin = Lane(lane_fd), np.empty(0)
        lane.tie(lane.pin(int.from_bytes(placed.span_id, "little")), pin)
        daemon.kill()
        # With a page missing, the daemon asks which others are. Those that were never written look like it.
        segments.punch(ring_fd, ring_bytes - PAGE_BYTES, PAGE_BYTES)
        assert placed.offset == 0
        segments.punch(ring_fd, 0, MIB)
        segments.allocate(ring_fd, 0, MIB)
        other = daemon.start().client(timeout_s=PATIENCE_S)
        names = [other.put(payload_key(number), payload(number), wait=True).key for number in range(60)]
        with mmap(ring_fd, ring_bytes) as ring:
            ring[placed.offset : placed.offset + MIB] = bytes(MIB)
        there = [number for number, name in enumerate(names) if other.contains(name)]
        assert there
        for number in there:
            lease = other.get(names[number])
            assert lease is not None and is_payload(lease.tree, number), f"entry {number} was overwritten"
        del pin
