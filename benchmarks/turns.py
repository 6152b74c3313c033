"""Measures how long one event of the store's core occupies the daemon's loop, with everything at its limit.

    python benchmarks/turns.py [--entries N] [--only NAME] [--json PATH]

Owns: the acts. Each act does one thing at its limit to a full store (turns_scene.py), carries out all consequences, and
reports the longest single event, in milliseconds of the thread's CPU time, which excludes other processes. The pump
(`daemon/actors/pump.py`) handles one event at a time. So the longest event bounds the wait for every answer.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from peers.bars import Figure, figures_table, save_figures
from turns_scene import KEYS_OF_EACH, SPAN_BYTES, TAGS, TurnsScene, key_of

from tensord.daemon.actors.lanes import ACCESSED_AT_ONCE
from tensord.daemon.core import events
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.memory.holders import Holders
from tensord.daemon.memory.lane_scan import LaneScan
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import LANE_WORDS

ENTRIES: Final = 262_144
LANES: Final = 64
MS_MAX: Final = 20.0
"""The longest time that one event may delay an answer."""


def touches(scene: TurnsScene) -> None:
    scene.send(1, messages.Touch(1, scene.keys[:KEYS_OF_EACH]))
    scene.settle()


def evicts(scene: TurnsScene) -> None:
    for start in range(0, 8 * KEYS_OF_EACH, KEYS_OF_EACH):
        scene.send(1, messages.Evict(1, scene.keys[start : start + KEYS_OF_EACH]))
    scene.settle()


def evicts_pinned(scene: TurnsScene) -> None:
    scene.pin()
    scene.longest_s = 0.0
    evicts(scene)


def reads(scene: TurnsScene) -> None:
    ids = scene.span_ids[:8192]
    for start in range(0, len(ids), ACCESSED_AT_ONCE):
        scene.do(events.Accessed(ids[start : start + ACCESSED_AT_ONCE]))
    scene.do(events.HoldersCounted([(number, 1) for number in ids[:1024]]))


def listed(scene: TurnsScene) -> None:
    for tag in (None, *TAGS, b"unknown."):
        after: bytes | None = None
        for _ in range(40):
            pages: list[tuple[list[dict[str, Any]], bytes | None]] = []
            scene.timed(lambda: pages.append(scene.store.entries(after, 1000, tag)))  # noqa: B023
            after = pages[0][1]


def clears(scene: TurnsScene) -> None:
    scene.send(1, messages.Clear(1, None))
    scene.settle()


def clears_pinned(scene: TurnsScene) -> None:
    scene.pin()
    scene.longest_s = 0.0
    clears(scene)


def invalidates(scene: TurnsScene) -> None:
    scene.send(1, messages.Invalidate(1, TAGS[0], 0))
    scene.settle()


def lowers_the_limit(scene: TurnsScene) -> None:
    scene.do(events.LimitsChanged(replace(scene.limits, max_entries=100)))
    scene.settle()


def idle_go(scene: TurnsScene) -> None:
    scene.now += 1000.0
    scene.do(Pressed(None, 1.0, False, "pressure"))
    scene.settle()


def puts(scene: TurnsScene) -> None:
    """All clients ask for places at once, and put into all of them."""
    scene.all_put()


def puts_behind_a_large_one(scene: TurnsScene) -> None:
    """All clients' requests wait behind one for half of the ring; then all entries leave."""
    scene.ask(1, [scene.entries * SPAN_BYTES // 2])
    scene.all_ask()
    scene.send(2, messages.Clear(1, None))
    scene.settle()


def declined(scene: TurnsScene) -> None:
    """The policy declines each put of all clients."""
    parent = scene.keys[1]
    scene.send(1, messages.Pin(1, parent, 600.0))
    scene.all_put()
    scene.policy.choosy = True
    scene.all_put(parent)


def refused_beside_pins(scene: TurnsScene) -> None:
    """All clients ask, and no stretch between the pins is wide enough for one of them."""
    scene.pin()
    scene.pinned = frozenset(scene.span_ids[::4])
    scene.longest_s = 0.0
    scene.all_ask(64 * SPAN_BYTES)
    scene.settle()


def placed_beside_pins(scene: TurnsScene) -> None:
    """Puts that find room while a quarter of all entries is pinned."""
    scene.pin()
    scene.pinned = frozenset(scene.span_ids[::4])
    scene.longest_s = 0.0
    scene.all_put()


def refuses(scene: TurnsScene) -> None:
    """All clients' requests wait; then the host's memory is short."""
    scene.all_ask()
    scene.do(Pressed(None, None, True, "pressure"))
    scene.settle()


def leaves(scene: TurnsScene) -> None:
    """A client disconnects with the most pins, places and claims that it may have."""
    scene.pin()
    for number in range(1024):
        scene.send(1, messages.RequestClaim(number, key_of(20_000_000 + number)))
    scene.all_ask()
    scene.settle()
    scene.longest_s = 0.0
    scene.do(events.ClientLeft(1))
    scene.settle()


def status(scene: TurnsScene) -> None:
    """A status request with the most places, pins and claims that there may be."""
    scene.pin()
    scene.pinned = frozenset(scene.span_ids)
    scene.all_ask()
    scene.longest_s = 0.0
    scene.timed(scene.store.status)
    scene.timed(scene.store.by_uid)


def lanes(scene: TurnsScene) -> None:
    """Every lane is full: a scan in slices, and a list of the holders."""
    ids = np.array(scene.span_ids, np.uint64)

    class Lane:
        def __init__(self, number: int) -> None:
            self._words = ids[number * LANE_WORDS % len(ids) :][:LANE_WORDS]

        def pins(self, into: Any) -> Any:
            into[: len(self._words)] = self._words
            return into[: len(self._words)][self._words != 0]

    readers: Any = [Lane(number) for number in range(LANES)]
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
    play: Callable[[TurnsScene], None]


ACTS: Final = (
    Act("a touch of 1,024 keys", touches),
    Act("reads of 8,192 entries, holders of 1,024", reads),
    Act("pages of entries, by namespace", listed),
    Act("a client with all it may have leaves", leaves),
    Act("status with all there may be", status),
    Act("a scan of full lanes, and their holders", lanes),
    Act("evicts of 1,024 keys", evicts),
    Act("evicts of 1,024 keys, all pinned by message", evicts_pinned),
    Act("puts of all clients, and room for them", puts),
    Act("requests for places behind a large one", puts_behind_a_large_one),
    Act("puts that are declined", declined),
    Act("places that are refused, beside pins", refused_beside_pins),
    Act("puts that are placed, beside pins", placed_beside_pins),
    Act("places that are refused under pressure", refuses),
    Act("all that is idle goes", idle_go),
    Act("a limit lowered to 100 entries", lowers_the_limit),
    Act("clear", clears),
    Act("clear, a quarter pinned by message", clears_pinned),
    Act("invalidate", invalidates),
)


def measured(entries: int, only: str, told: Callable[[str], None]) -> list[Figure]:
    """The longest event of each act whose name contains `only`, in milliseconds."""
    scene = TurnsScene(entries)
    told(f"recovery before the first client: {scene.fill():.2f} s")
    gc.collect()
    gc.freeze()
    return [Figure(act.name, _played(act, scene, told), MS_MAX, "ms") for act in ACTS if only in act.name]


def _played(act: Act, scene: TurnsScene, told: Callable[[str], None]) -> float:
    """The longest event in milliseconds. A forked process runs the act, so that the scene stays unchanged."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        # The first write to a page copies the page: done before the act.
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
    parser.add_argument("--entries", type=int, default=ENTRIES, help="entries in the store (default: %(default)s)")
    parser.add_argument("--only", default="", help="only acts whose name contains this text")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    # The daemon's thresholds.
    gc.set_threshold(10_000, 20, 1000)
    figures = measured(given.entries, given.only, lambda what: print(what, flush=True))
    print(figures_table(figures))
    if given.json is not None:
        save_figures(given.json, figures)


if __name__ == "__main__":
    main()
