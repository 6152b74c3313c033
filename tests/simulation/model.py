"""The reference model: the last published version of each key, and the reasons of removals."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .payloads import TAGS, before, era_of, number_of, tag_of


class Model:
    """Records each publication and each announced removal. The daemon announces a sweep once for all of its entries."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.made: dict[int, set[int]] = defaultdict(set)
        self.stored: dict[int, set[int]] = defaultdict(set)
        self.published = 0
        self.ends_at: dict[int, float] = {}
        self.eras = dict.fromkeys(TAGS, 0)
        """Generation of each namespace."""
        self.ended: dict[str, int] = defaultdict(int)
        self._sweeps: list[tuple[int, bytes | None, set[int]]] = []

    def puts(self, number: int, version: int) -> None:
        """Records that a client has begun to put a version."""
        self.made[number].add(version)

    def publish(self, number: int, version: int, ends_at: float) -> None:
        """Records that the daemon has published a version. `ends_at`: the end of its time to live."""
        assert version in self.made[number], f"key {number}: no client has put version {version}"
        assert era_of(number) >= self.eras[tag_of(number)], f"key {number}: stored under a past generation"
        for *_, meant in self._sweeps:
            meant.discard(number)  # a sweep removes no entry that is published after the sweep began
        self.there[number] = version
        self.ends_at[number] = ends_at
        self.stored[number].add(version)
        self.published += 1

    def touched(self, number: int, ends_at: float) -> None:
        """Records that the time to live of an entry begins anew."""
        if number in self.there:
            self.ends_at[number] = ends_at

    def announced(self, body: dict[str, Any], now: float) -> None:
        """Records the announced removal of an entry, or the announced end of a sweep."""
        if body["event"] in ("evict", "expire"):
            number = number_of(bytes.fromhex(body["key"]))
            self.ended[body["reason"]] += 1
            # An entry is removed with its parent. The parent may expire just before the eviction of the entry.
            early = body["event"] == "expire" and now < self.ends_at[number] - 1e-3 and before(number) is None
            assert not early, f"key {number} expired at {now}, before its end at {self.ends_at[number]}"
            assert self.there.pop(number, None) is not None, f"key {number} was removed twice"
            for *_, meant in self._sweeps:
                meant.discard(number)
        elif body["event"] in ("clear", "invalidate"):
            tag = body["namespace"]
            self._swept(None if tag is None else bytes.fromhex(tag))

    def sweep(self, request: int, tag: bytes | None, *, below: int | None = None) -> None:
        """Records a Clear or Invalidate. Its removals are not announced one by one.

        `below`: only entries of earlier generations are removed.
        """
        meant = {number for number in self.there if tag is None or tag_of(number) == tag}
        if below is not None:
            meant = {number for number in meant if era_of(number) < below}
        self._sweeps.append((request, tag, meant))

    def refused(self, request: int) -> None:
        """Records that a request was answered without a sweep."""
        self._sweeps = [sweep for sweep in self._sweeps if sweep[0] != request]

    def invalidated(self, tag: bytes, era: int) -> None:
        """Records the current generation of a namespace."""
        assert era >= self.eras[tag], f"the generation of {tag!r} fell from {self.eras[tag]} to {era}"
        self.eras[tag] = era

    def _swept(self, tag: bytes | None) -> None:
        # Those of several namespaces that another host has invalidated come in any order.
        first = next(at for at, (_, of, _) in enumerate(self._sweeps) if of == tag)
        *_, meant = self._sweeps.pop(first)
        for number in meant:
            self.there.pop(number, None)

    def restarted(self, visible: set[int]) -> None:
        """Records the end of a daemon. The entries that it had hidden for a scan are lost."""
        self._sweeps.clear()
        self.there = {number: version for number, version in self.there.items() if number in visible}

    def expect(self) -> set[int]:
        """Drops the entries of past generations, as a restart does. Returns the keys that the next daemon must find."""
        self.there = {number: v for number, v in self.there.items() if era_of(number) >= self.eras[tag_of(number)]}
        return set(self.there)

    def check(self, visible: set[int], hidden: set[int], sound: set[int]) -> None:
        """Asserts that readers find exactly the expected entries; those of `sound` with their parents."""
        surplus = visible - self.there.keys()
        assert not surplus, f"keys {sorted(surplus)} are visible but were never stored"
        swept = {number for *_, meant in self._sweeps for number in meant}
        lost = self.there.keys() - visible - hidden - swept
        assert not lost, f"keys {sorted(lost)} are lost: they were stored and no removal was announced"
        for number in sound:
            parent = before(number)
            assert parent is None or parent in visible, f"{number} is visible without its parent {parent}"
