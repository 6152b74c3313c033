"""What must be there: one table of which version of each key was published last, and why each that has gone went."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .payloads import TAGS, before, era_of, is_block, number_of, tag_of


class Model:
    """Told of each publication and of each announced end; sweeps are announced once, for all that they end."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.made: dict[int, set[int]] = defaultdict(set)
        self.stored: dict[int, set[int]] = defaultdict(set)
        self.published = 0
        self.ends_at: dict[int, float] = {}
        self.eras = dict.fromkeys(TAGS, 0)
        """The generation of each namespace."""
        self.ended: dict[str, int] = defaultdict(int)
        self._sweeps: list[tuple[int, set[int]]] = []

    def puts(self, number: int, version: int) -> None:
        """A client has begun to put it."""
        self.made[number].add(version)

    def publish(self, number: int, version: int, ends_at: float) -> None:
        """The daemon has shown it to readers. `ends_at`: when its time to live is over."""
        assert version in self.made[number], f"key {number}: nobody has put version {version}"
        assert era_of(number) >= self.eras[tag_of(number)], f"key {number}: stored under a past generation"
        for _, meant in self._sweeps:
            meant.discard(number)  # what is published after a sweep began is none of its
        self.there[number] = version
        self.ends_at[number] = ends_at
        self.stored[number].add(version)
        self.published += 1

    def touched(self, number: int, ends_at: float) -> None:
        """Its time to live begins anew."""
        if number in self.there:
            self.ends_at[number] = ends_at

    def announced(self, body: dict[str, Any], now: float) -> None:
        """The daemon has ended an entry, and says why."""
        if body["event"] in ("evict", "expire"):
            number = number_of(bytes.fromhex(body["key"]))
            self.ended[body["reason"]] += 1
            # A block goes with the one before it, which may have expired while this one was about to be evicted.
            early = body["event"] == "expire" and now < self.ends_at[number] - 1e-3 and before(number) is None
            assert not early, f"key {number} expired at {now}, and its time was up at {self.ends_at[number]}"
            assert self.there.pop(number, None) is not None, f"key {number} has ended twice"
            for _, meant in self._sweeps:
                meant.discard(number)
        elif body["event"] in ("clear", "invalidate", "evict_prefixes"):
            self._swept()

    def sweep(self, request: int, tag: bytes | None, *, sequences: bool = False, below: int | None = None) -> None:
        """Clear, Invalidate or EvictPrefixes was heard: entries of the namespace may go without a word each.

        `sequences`: blocks of sequences alone. `below`: those alone that were made at a generation before this.
        """
        meant = {n for n in self.there if (tag is None or tag_of(n) == tag) and (is_block(n) or not sequences)}
        if below is not None:
            meant = {number for number in meant if era_of(number) < below}
        self._sweeps.append((request, meant))

    def refused(self, request: int) -> None:
        """It was answered, and nothing has come of it."""
        self._sweeps = [sweep for sweep in self._sweeps if sweep[0] != request]

    def invalidated(self, tag: bytes, era: int) -> None:
        """The generation of a namespace is this."""
        assert era >= self.eras[tag], f"the generation of {tag!r} fell from {self.eras[tag]} to {era}"
        self.eras[tag] = era

    def _swept(self) -> None:
        _, meant = self._sweeps.pop(0)
        for number in meant:
            self.there.pop(number, None)

    def restarted(self, visible: set[int]) -> None:
        """The daemon was killed: what it had hidden for a scan has gone with it."""
        self._sweeps.clear()
        self.there = {number: version for number, version in self.there.items() if number in visible}

    def expect(self) -> set[int]:
        """The keys that the next daemon finds: those under a past generation go with the restart."""
        self.there = {number: v for number, v in self.there.items() if era_of(number) >= self.eras[tag_of(number)]}
        return set(self.there)

    def check(self, visible: set[int], hidden: set[int]) -> None:
        """Asserts that readers find what must be there, and nothing else."""
        surplus = visible - self.there.keys()
        assert not surplus, f"keys {sorted(surplus)} are there, and nobody has stored them"
        swept = {number for _, meant in self._sweeps for number in meant}
        lost = self.there.keys() - visible - hidden - swept
        assert not lost, f"keys {sorted(lost)} are lost: they were stored, and nothing says why they have gone"
        for number in visible:
            parent = before(number)
            assert parent is None or parent in visible, f"block {number} is there without block {parent} before it"
