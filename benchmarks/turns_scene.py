"""A store at its limits, without a daemon: the scene of turns.py.

Owns: the store under test, the roles of its clients, copier and lanes, and the longest event so far, in CPU time of the
thread. No payload is written, and there are no sockets.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Final

import numpy as np

from tensord.daemon.core import effects, events
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.parts import StoreMemory
from tensord.daemon.core.store import Store
from tensord.daemon.replacement import POLICIES
from tensord.daemon.replacement.hazard import Hazard
from tensord.daemon.store.table import LIVE
from tensord.ipc.messages import control as messages
from tensord.shm.index.index import IndexWriter
from tensord.shm.index.keys import make_key
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.ring.layout import IndexGeometry, span_bytes

CLIENTS: Final = 64
PINS_OF_EACH, KEYS_OF_EACH, PLACES_OF_EACH = 1024, 1024, 256
RECORDS_AT_ONCE: Final = 64
"""Records that the daemon carries out in one turn."""
RARE: Final = 3000
"""Entries of the second namespace: more than one sort takes, and few on each shelf."""
ACT_S_MAX: Final = 10.0
"""An act that takes longer is stopped: its longest event has occurred many times by then."""
PAYLOAD_BYTES: Final = 64
SPAN_BYTES: Final = span_bytes(PAYLOAD_BYTES)
TAGS: Final = (b"common..", b"rare....")


class ChoosyHazard(Hazard):
    """Refuses every entry that has a parent, if `choosy`."""

    choosy = False

    def admits(self, digest: int, size: int, parent: int, cost: float = 0.0, tokens: int = 0, agent: int = 0) -> bool:
        return not self.choosy


def key_of(number: int, tag: bytes = TAGS[0]) -> bytes:
    """The key of a number."""
    return make_key(tag, hashlib.sha256(number.to_bytes(8, "big", signed=True)).digest()[:24], 0)


class TurnsScene:
    """A store that `entries` entries fill, with its clients, its copier and its lanes."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.longest_s = 0.0
        self.pinned: frozenset[int] = frozenset()
        self.refused = 0
        self.now = 1.0
        self.limits = StoreLimits(
            ring_bytes=entries * SPAN_BYTES,
            max_bytes=entries * SPAN_BYTES,
            max_entries=entries,
            object_bytes_max=entries * SPAN_BYTES,
            pinned_bytes_max=entries * SPAN_BYTES,
        )
        self._geometry = IndexGeometry.for_entries(entries, 64)
        self._index_bytes = mmap(-1, self._geometry.index_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        self._ring = mmap(-1, entries * SPAN_BYTES, MAP_PRIVATE | MAP_ANONYMOUS)
        self._epoch = 0
        POLICIES["choosy"] = ChoosyHazard
        self._begin(IndexWriter.create(self._geometry, self._index_bytes))

    def _begin(self, index: IndexWriter) -> None:
        self._epoch += 1
        self.index = index
        memory = StoreMemory(
            index, memoryview(self._index_bytes), self._geometry, memoryview(self._ring), self.entries * SPAN_BYTES
        )
        self.store = Store(memory, "choosy", self.limits, self._epoch, seed=self._epoch)
        self._moves: deque[effects.Move] = deque()
        self._scans = 0
        self._records = [0] * (CLIENTS + 1)
        self._places: dict[int, list[tuple[int, int]]] = {client: [] for client in range(1, CLIENTS + 1)}

    def fill(self) -> float:
        """Puts all entries, and lets the next store find them. RARE of them are in another namespace, evenly spread.

        Returns:
            The duration of the recovery in seconds.
        """
        every = max(1, self.entries // RARE)
        self._join()
        for first in range(0, self.entries, PLACES_OF_EACH):
            client = 1 + first // PLACES_OF_EACH % CLIENTS
            numbers = range(first, min(first + PLACES_OF_EACH, self.entries))
            self.ask(client, [SPAN_BYTES] * len(numbers))
            self.settle()
            self.commit(client, [key_of(number, TAGS[number % every == 0]) for number in numbers], ttl_s=1e6)
        self._begin(IndexWriter(self._index_bytes, self._geometry))
        began = time.thread_time()
        self.step_by_step(self.store.recover(self.now))
        took_s = time.thread_time() - began
        self._join()
        self.settle()
        self.keys = list(self.store.parts.table.by_key)
        return took_s

    def _join(self) -> None:
        for client in range(1, CLIENTS + 1):
            self.do(events.ClientJoined(client, 1000 + client % 4, f"client {client}"))
            self.do(events.WritesInPlace(client))

    @property
    def policy(self) -> ChoosyHazard:
        policy = self.store.policy
        assert isinstance(policy, ChoosyHazard)
        return policy

    @property
    def span_ids(self) -> list[int]:
        """The span ids of all entries, in ascending order."""
        table = self.store.parts.table
        live = np.frombuffer(table.states, np.uint8) == LIVE
        return sorted(table.column("span_ids")[live].tolist())

    def ask(self, client: int, sizes: Sequence[int]) -> None:
        """A client asks for places."""
        self.send(client, messages.AskForGrants(1, list(sizes)))

    def commit(self, client: int, keys: Sequence[bytes], parent: bytes = NO_KEY, ttl_s: float = 0.0) -> None:
        """A client writes records of keys, as far as it has places, and the daemon takes them a turn at a time."""
        records = []
        for key in keys:
            if not self._places[client]:
                break
            grant, offset = self._places[client].pop()
            self._records[client] += 1
            records.append(
                RECORD.pack(
                    self._records[client], key, offset, PAYLOAD_BYTES, 1, 0, parent, 0.0, ttl_s, grant, 16, 1, 0, 0, 0
                )
            )
        for first in range(0, len(records), RECORDS_AT_ONCE):
            batch = memoryview(b"".join(records[first : first + RECORDS_AT_ONCE]))
            began = time.thread_time()
            made = self.store.submitted(client, batch, self.now, {})[1]
            self._took(time.thread_time() - began)
            self._follow(made)

    def send(self, client: int, message: Any) -> None:
        self.do(events.Received(client, message))

    def do(self, event: events.Event) -> None:
        """Handles one event, and times it."""
        began = time.thread_time()
        effects_of_it = self.store.handle(event, self.now)
        self._took(time.thread_time() - began)
        self._follow(effects_of_it)

    def _follow(self, made: list[effects.Effect]) -> None:
        for effect in made:
            match effect:
                case effects.Move():
                    self._moves.append(effect)
                case effects.Drain():
                    self.do(events.Drained())
                case effects.Scan():
                    self._scans += 1
                case effects.Again(client, message, counted):
                    self.do(events.Received(client, message, counted))
                case effects.Send(client, messages.GrantsLent(grants=grants, error=error)):
                    self._places[client] += [(number, offset) for number, offset, *_ in grants]
                    self.refused += error is not None
                case effects.Send(_, messages.PutRefused()):
                    self.refused += 1

    def walk(self) -> None:
        """Writes to all pages of columns, index and ring, so that they belong to this process."""
        for memory in (self._index_bytes, self._ring):
            pages = np.frombuffer(memory, np.uint8)[::4096]
            pages[:] = pages.copy()
        table = self.store.parts.table
        for name in ("span_ids", "offsets", "sizes", "payloads", "digests", "nexts", "prevs", "slots", "owners"):
            column = table.column(name)
            column[:] = column.copy()

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
            if self._moves:
                self.do(events.Moved(self._moves.popleft().number))
            elif self._scans:
                self._scans -= 1
                self.do(events.Scanned(frozenset(set(self.pinned))))
            elif timer is not None and timer <= self.now:
                self.do(events.Tick())
            else:
                return

    def all_ask(self, size: int = SPAN_BYTES) -> None:
        """All clients ask for as many places as one request may."""
        for client in range(1, CLIENTS + 1):
            self.ask(client, [size] * PLACES_OF_EACH)

    def all_put(self, parent: bytes = NO_KEY) -> None:
        """All clients ask for places, and put into what they get."""
        self.all_ask()
        self.settle()
        for client in range(1, CLIENTS + 1):
            first = 10_000_000 + client * PLACES_OF_EACH
            self.commit(client, [key_of(number) for number in range(first, first + PLACES_OF_EACH)], parent)
        self.settle()

    def pin(self) -> None:
        """Every client pins by message as many entries as it may; by default a quarter of all entries."""
        keys = iter(self.keys)
        for client in range(1, CLIENTS + 1):
            for _ in range(min(PINS_OF_EACH, len(self.keys) // (4 * CLIENTS))):
                self.send(client, messages.Pin(1, next(keys), 600.0))

    def _took(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
