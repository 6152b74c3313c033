"""A store at its limits, without a daemon: the scene of turns.py.

Owns: the store under test, the roles of its clients, copier and lanes, and the longest event so far, in CPU time of the
thread. The store has no ring bytes and no sockets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from tensord.daemon.core import effects, events
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.recovery import Recovered
from tensord.daemon.core.store import Store
from tensord.daemon.policy.hazard import Hazard
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.keys import make_key
from tensord.shm.layout import IndexGeometry, SpanHeader, span_id

CLIENTS: Final = 64
PINS_OF_EACH, KEYS_OF_EACH, PUTS_OF_EACH = 1024, 1024, 256
RARE: Final = 3000
"""Entries of the second namespace: more than one sort takes, and few on each shelf."""
ACT_S_MAX: Final = 10.0
"""An act that takes longer is stopped: its longest event has occurred many times by then."""
PAYLOAD_BYTES: Final = 64
SPAN_BYTES: Final = 192
TAGS: Final = (b"common..", b"rare....")


class ChoosyHazard(Hazard):
    """Refuses every block that has a parent, if `choosy`."""

    choosy = False

    def admits(self, new: Any, victim: int) -> bool:
        return not (self.choosy and new.depth)


def key_of(number: int, tag: bytes = TAGS[0]) -> bytes:
    """The key of a number."""
    return make_key(tag, hashlib.sha256(number.to_bytes(8, "big", signed=True)).digest()[:24], 0)


class TurnsScene:
    """A store that `entries` entries fill, with its clients, its copier and its lanes."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.longest_s = 0.0
        self.pinned: frozenset[int] = frozenset()
        self._copies: deque[effects.Copy] = deque()
        self._scans = 0
        self.refused = 0
        self.now = 1.0
        self.policy = ChoosyHazard()
        self.index = IndexWriter.create(IndexGeometry.for_entries(entries, 64))
        self.limits = StoreLimits(
            ring_bytes=entries * SPAN_BYTES,
            max_bytes=entries * SPAN_BYTES,
            max_entries=entries,
            object_bytes_max=entries * SPAN_BYTES,
            pinned_bytes_max=entries * SPAN_BYTES,
        )
        self.store = Store(self.index, SpanAllocator(entries * SPAN_BYTES), self.policy, self.limits, 2)
        for client in range(1, CLIENTS + 1):
            self.do(events.ClientJoined(client, 1000 + client % 4, f"client {client}"))

    def fill(self) -> float:
        """Lets the store find all entries, as after a restart. RARE of them are in another namespace, evenly spread.

        Returns:
            The duration of the recovery in seconds.
        """
        every = max(1, self.entries // RARE)
        records = []
        for number in range(self.entries):
            key, span, offset = key_of(number, TAGS[number % every == 0]), span_id(1, number + 1), number * SPAN_BYTES
            slot = self.index.reserve(key, span, offset, 16, PAYLOAD_BYTES)
            if slot is None:
                continue
            self.index.publish(slot)
            uid = 1000 + number % 4
            header = SpanHeader(key, span, PAYLOAD_BYTES, 16, 0, 1, 0.5, 1e6, uid, 0, 0.0, 1e6)
            records.append(Recovered(slot, header, True))
        began = time.thread_time()
        self.store.recover(records, self.now)
        took_s = time.thread_time() - began
        self.settle()
        self.keys = [entry.key for entry in self.store.memory.entries]
        return took_s

    def commit(self, client: int, request: int, key: bytes, **more: Any) -> None:
        payload_bytes = more.pop("payload_bytes", PAYLOAD_BYTES)
        self.send(client, messages.Commit(request, key, payload_bytes, 16, tokens=1, acks=False, ttl_s=1e6, **more))

    def part(self, client: int, request: int, part_bytes: int = PAYLOAD_BYTES) -> None:
        self.send(client, messages.Part(request, 0, part_bytes, True))

    def send(self, client: int, message: Any) -> None:
        self.do(events.Received(client, message))

    def do(self, event: events.Event) -> None:
        """Handles one event, and times it."""
        began = time.thread_time()
        effects_of_it = self.store.handle(event, self.now)
        self._took(time.thread_time() - began)
        for effect in effects_of_it:
            match effect:
                case effects.Copy():
                    self._copies.append(effect)
                case effects.Drain():
                    self.do(events.Drained())
                case effects.Scan():
                    self._scans += 1
                case effects.Again(client, message, counted):
                    self.do(events.Received(client, message, counted))
                case effects.Send(_, messages.Committed(outcome="refused")):
                    self.refused += 1

    def walk(self) -> None:
        """Reads everything about every entry, so that its pages belong to this process."""
        for entry in self.store.memory.entries:
            dataclasses.astuple(replace(entry, parent=None, newest_child=None, sibling=None, sibling_before=None))

    def timed(self, query: Callable[[], object]) -> None:
        """Times another call that the loop makes without a pause."""
        began = time.thread_time()
        query()
        self._took(time.thread_time() - began)

    def step_by_step(self, work: Iterable[Any]) -> list[Any]:
        """Runs work that the loop does in slices, and returns the results."""
        slices, given = iter(work), list[Any]([None])
        while given[-1] is not self:
            self.timed(lambda: given.append(next(slices, self)))
        return given[1:-1]

    def settle(self) -> None:
        """Carries out all consequences until nothing is due, or until ACT_S_MAX have passed."""
        until_s = time.thread_time() + ACT_S_MAX
        while time.thread_time() < until_s:
            timer = self.store.next_timer()
            if self._copies:
                copy = self._copies.popleft()
                self.do(events.Copied(copy.client, copy.put_id, 1 if copy.last else None))
            elif self._scans:
                self._scans -= 1
                self.do(events.Scanned(frozenset(set(self.pinned))))
            elif timer is not None and timer <= self.now:
                self.do(events.Tick())
            else:
                return

    def waiting_puts(self, **more: Any) -> None:
        """As many puts as all clients may have; they wait for the answer of a scan."""
        for number in range(PUTS_OF_EACH):
            for client in range(1, CLIENTS + 1):
                request = 10_000_000 + number
                self.commit(client, request, key_of(10_000_000 + number * CLIENTS + client), **more)
                self.part(client, request, more.get("payload_bytes", PAYLOAD_BYTES))

    def pin(self) -> None:
        """Every client pins by message as many entries as it may; by default a quarter of all entries."""
        keys = iter(self.keys)
        for client in range(1, CLIENTS + 1):
            for _ in range(min(PINS_OF_EACH, len(self.keys) // (4 * CLIENTS))):
                self.send(client, messages.Pin(1, next(keys), 600.0))

    def _took(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
