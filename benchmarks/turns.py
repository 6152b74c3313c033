"""How long the daemon's loop is kept by one event of the store's core, with everything at its limit.

    python benchmarks/turns.py [--entries N] [--only NAME] [--json PATH]

Owns: the scenes. Each fills a store without a daemon (no ring bytes, no sockets), does one thing at its limit, carries
out all that follows from it, and keeps the longest single event, in milliseconds of CPU time of the thread: what other
processes take does not count. The pump (`daemon/actors/pump.py`) begins no other event while one is handled, so the
longest event bounds what every answer waits for.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from bars import Figure, figures_table, save_figures

from tensord.daemon.actors.lanes import ACCESSED_AT_ONCE
from tensord.daemon.core import effects, events
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.recovery import Recovered
from tensord.daemon.core.store import Store
from tensord.daemon.holders import Holders
from tensord.daemon.lane_scan import LaneScan
from tensord.daemon.policy.hazard import Hazard
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.keys import make_key
from tensord.shm.layout import LANE_WORDS, IndexGeometry, SpanHeader, span_id

ENTRIES: Final = 262_144
CLIENTS: Final = 64
PINS_OF_EACH, KEYS_OF_EACH, PUTS_OF_EACH = 1024, 1024, 256
RARE: Final = 3000
"""Entries of the second namespace: more than are sorted at once, and few on each shelf."""
MS_MAX: Final = 20.0
"""No answer waits longer, so neither may an event."""
ACT_S_MAX: Final = 10.0
"""An act that has more to do than this is broken off: its longest event has come many times."""
PAYLOAD_BYTES: Final = 64
SPAN_BYTES: Final = 192
_RECORD_BYTES: Final = 128
_TAGS: Final = (b"common..", b"rare....")


class Choosy(Hazard):
    """Turns away whatever follows something."""

    choosy = False

    def admits(self, new: Any, victim: int) -> bool:
        return not (self.choosy and new.depth)


def key_of(number: int, tag: bytes = _TAGS[0]) -> bytes:
    """The number's key."""
    return make_key(tag, hashlib.sha256(number.to_bytes(8, "big", signed=True)).digest()[:24], 0)


class Scene:
    """A store of `entries`, which fill it, and those who play its clients, the copier and the lanes."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.longest_s = 0.0
        self.pinned: frozenset[int] = frozenset()
        self._copies: deque[effects.Copy] = deque()
        self._scans = 0
        self.refused = 0
        self.now = 1.0
        self.policy = Choosy()
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
        """Has the store find all entries, as after a restart; every few are of another namespace, RARE in all.

        Returns:
            How long the recovery took, in seconds.
        """
        every = max(1, self.entries // RARE)
        records = []
        for number in range(self.entries):
            key, span, offset = key_of(number, _TAGS[number % every == 0]), span_id(1, number + 1), number * SPAN_BYTES
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
        """One event, timed."""
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
        """Looks at everything that is known of every entry, so that its pages are this process's own."""
        for entry in self.store.memory.entries:
            dataclasses.astuple(replace(entry, parent=None, newest_child=None, sibling=None, sibling_before=None))

    def timed(self, query: Callable[[], object]) -> None:
        """Something else that the loop does at one go."""
        began = time.thread_time()
        query()
        self._took(time.thread_time() - began)

    def step_by_step(self, work: Iterable[Any]) -> list[Any]:
        """Work that the loop does in slices. What they gave."""
        slices, given = iter(work), list[Any]([None])
        while given[-1] is not self:
            self.timed(lambda: given.append(next(slices, self)))
        return given[1:-1]

    def settle(self) -> None:
        """Carries out whatever follows, until nothing is due now, or ACT_S_MAX have been spent."""
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
        """As many puts as all clients may have, which wait for the answer of a scan."""
        for number in range(PUTS_OF_EACH):
            for client in range(1, CLIENTS + 1):
                request = 10_000_000 + number
                self.commit(client, request, key_of(10_000_000 + number * CLIENTS + client), **more)
                self.part(client, request, more.get("payload_bytes", PAYLOAD_BYTES))

    def pin(self) -> None:
        """Every client pins by message as many entries as it may: as a rule, a quarter of all."""
        keys = iter(self.keys)
        for client in range(1, CLIENTS + 1):
            for _ in range(min(PINS_OF_EACH, len(self.keys) // (4 * CLIENTS))):
                self.send(client, messages.Pin(1, next(keys), 600.0))

    def _took(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)


def touches(scene: Scene) -> None:
    scene.send(1, messages.Touch(1, scene.keys[:KEYS_OF_EACH]))
    scene.settle()


def evicts(scene: Scene) -> None:
    for start in range(0, 8 * KEYS_OF_EACH, KEYS_OF_EACH):
        scene.send(1, messages.Evict(1, scene.keys[start : start + KEYS_OF_EACH]))
    scene.settle()


def evicts_pinned(scene: Scene) -> None:
    scene.pin()
    scene.longest_s = 0.0
    evicts(scene)


def reads(scene: Scene) -> None:
    ids = [entry.span_id for entry in scene.store.memory.entries][:8192]
    for start in range(0, len(ids), ACCESSED_AT_ONCE):
        scene.do(events.Accessed(ids[start : start + ACCESSED_AT_ONCE]))
    scene.do(events.HoldersCounted([(number, 1) for number in ids[:1024]]))


def listed(scene: Scene) -> None:
    for tag in (None, *_TAGS, b"unknown."):
        after: bytes | None = None
        for _ in range(40):
            pages: list[tuple[list[dict[str, Any]], bytes | None]] = []
            scene.timed(lambda: pages.append(scene.store.entries(after, 1000, tag)))  # noqa: B023
            after = pages[0][1]


def clears(scene: Scene) -> None:
    scene.send(1, messages.Clear(1, None))
    scene.settle()


def clears_pinned(scene: Scene) -> None:
    scene.pin()
    scene.longest_s = 0.0
    clears(scene)


def invalidates(scene: Scene) -> None:
    scene.send(1, messages.Invalidate(1, _TAGS[0], 0))
    scene.settle()


def lowers_the_limit(scene: Scene) -> None:
    scene.do(events.LimitsChanged(replace(scene.limits, max_entries=100)))
    scene.settle()


def idle_go(scene: Scene) -> None:
    scene.now += 1000.0
    scene.do(events.Pressed(None, 1.0, False, "pressure"))
    scene.settle()


def waits_and_is_placed(scene: Scene) -> None:
    """All clients' puts wait for one scan, and find room at once."""
    scene.do(events.LimitsChanged(replace(scene.limits, max_entries=scene.entries)))
    scene.waiting_puts()
    scene.settle()


def waits_and_finds_room(scene: Scene) -> None:
    """All clients' puts wait behind one that nothing makes room for yet; then all there is has gone."""
    scene.commit(1, 1, key_of(-1), payload_bytes=scene.entries * SPAN_BYTES // 2)
    scene.part(1, 1, scene.entries * SPAN_BYTES // 2)
    scene.waiting_puts()
    scene.send(2, messages.Clear(1, None))
    scene.settle()


def declined(scene: Scene) -> None:
    """All clients' puts wait, and the policy turns each away."""
    scene.policy.choosy = True
    parent_key = scene.keys[1]
    scene.send(1, messages.Pin(1, parent_key, 600.0))
    scene.waiting_puts(parent=parent_key, prefix_bytes=_RECORD_BYTES, payload_bytes=PAYLOAD_BYTES + _RECORD_BYTES)
    scene.settle()


def refused_beside_pins(scene: Scene) -> None:
    """All clients' puts wait, and no stretch between the pins is wide enough for any."""
    scene.pin()
    scene.pinned = frozenset(entry.span_id for n, entry in enumerate(scene.store.memory.entries) if n % 4 == 0)
    scene.longest_s = 0.0
    scene.waiting_puts(payload_bytes=64 * SPAN_BYTES)
    scene.settle()


def placed_beside_pins(scene: Scene) -> None:
    """Puts that find room while a quarter of all entries is pinned."""
    scene.pin()
    scene.pinned = frozenset(entry.span_id for n, entry in enumerate(scene.store.memory.entries) if n % 4 == 0)
    scene.longest_s = 0.0
    scene.waiting_puts()
    scene.settle()


def refuses(scene: Scene) -> None:
    scene.commit(1, 1, key_of(-1))
    scene.part(1, 1)
    scene.waiting_puts()
    scene.do(events.Pressed(None, None, True, "pressure"))
    scene.settle()


def leaves(scene: Scene) -> None:
    """A client leaves that has as many pins, puts and claims as it may."""
    scene.pin()
    for number in range(1024):
        scene.send(1, messages.RequestClaim(number, key_of(20_000_000 + number)))
    for number in range(PUTS_OF_EACH):
        scene.commit(1, 10_000_000 + number, key_of(10_000_000 + number))
    scene.longest_s = 0.0
    scene.do(events.ClientLeft(1))
    scene.settle()


def status(scene: Scene) -> None:
    """With as many puts, pins and claims as there may be."""
    scene.pin()
    scene.pinned = frozenset(entry.span_id for entry in scene.store.memory.entries)
    for client in range(1, CLIENTS + 1):
        for number in range(PUTS_OF_EACH):
            scene.commit(client, number, key_of(10_000_000 + number * CLIENTS + client))
    scene.longest_s = 0.0
    scene.timed(scene.store.status)
    scene.timed(scene.store.by_uid)


def lanes(scene: Scene) -> None:
    """Every lane full, by one slice each: a scan, and who holds what."""
    ids = np.array(sorted(entry.span_id for entry in scene.store.memory.entries), np.uint64)

    class Lane:
        def __init__(self, number: int) -> None:
            self._words = ids[number * LANE_WORDS % len(ids) :][:LANE_WORDS]

        def pins(self, into: Any) -> Any:
            into[: len(self._words)] = self._words
            return into[: len(self._words)][self._words != 0]

    readers: Any = [Lane(number) for number in range(CLIENTS)]
    scan = LaneScan(readers, scene.index.span_ids)
    scene.step_by_step(scan)
    none = np.empty(0, np.uint64)
    count = Holders(none, none).count(scene.index.span_ids)
    scratch = np.empty(LANE_WORDS, np.uint64)
    for reader in readers:
        scene.step_by_step(count.add(reader.pins(scratch)))
    for changes in scene.step_by_step(count.changes()):
        scene.do(events.HoldersCounted(changes))


@dataclass(frozen=True, slots=True)
class Act:
    """One thing at its limit."""

    name: str
    play: Callable[[Scene], None]


ACTS: Final = (
    Act("a touch of 1,024 keys", touches),
    Act("reads of 8,192 entries, holders of 1,024", reads),
    Act("pages of entries, by namespace", listed),
    Act("a client with all it may have leaves", leaves),
    Act("status with all there may be", status),
    Act("a scan of full lanes, and their holders", lanes),
    Act("evicts of 1,024 keys", evicts),
    Act("evicts of 1,024 keys, all pinned by message", evicts_pinned),
    Act("puts that wait for a scan", waits_and_is_placed),
    Act("puts that wait behind a large one", waits_and_finds_room),
    Act("puts that are declined", declined),
    Act("puts that are refused, beside pins", refused_beside_pins),
    Act("puts that are placed, beside pins", placed_beside_pins),
    Act("puts that are refused under pressure", refuses),
    Act("all that is idle goes", idle_go),
    Act("a limit lowered to 100 entries", lowers_the_limit),
    Act("clear", clears),
    Act("clear, a quarter pinned by message", clears_pinned),
    Act("invalidate", invalidates),
)


def measured(entries: int, only: str, told: Callable[[str], None]) -> list[Figure]:
    """The longest event of each act whose name has `only` in it, in milliseconds."""
    scene = Scene(entries)
    told(f"recovery, before anybody is served: {scene.fill():.2f} s")
    gc.collect()
    gc.freeze()
    return [Figure(act.name, _played(act, scene, told), MS_MAX, "ms") for act in ACTS if only in act.name]


def _played(act: Act, scene: Scene, told: Callable[[str], None]) -> float:
    """The longest event in milliseconds. In a process of its own, so that the next act finds the scene as it was."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        # Pages are copied when they are first written to: before the act, not within it.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        scene.walk()
        scene.longest_s = 0.0
        began = time.thread_time()
        act.play(scene)
        all_s = time.thread_time() - began
        told(f"{act.name}: {1e3 * scene.longest_s:.2f} ms, in all {all_s:.2f} s, {scene.refused} refused")
        os.write(there, str(1e3 * scene.longest_s).encode())
        os._exit(0)
    os.close(there)
    with open(here) as answer:
        longest_ms = answer.read()
    os.waitpid(child, 0)
    if not longest_ms:
        raise RuntimeError(f"{act.name}: failed")
    return float(longest_ms)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=ENTRIES, help="how many the store holds (default: %(default)s)")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--json", type=Path, help="the figures, for programs")
    given = parser.parse_args()
    # As the daemon has it.
    gc.set_threshold(10_000, 20, 1000)
    figures = measured(given.entries, given.only, lambda what: print(what, flush=True))
    print(figures_table(figures))
    if given.json is not None:
        save_figures(given.json, figures)


if __name__ == "__main__":
    main()
