"""Who was evicted, by key: about so many at most, the oldest are forgotten.

Kept in PARTS dicts by the hash of the key. One dict of a million takes 50 ms when it has to grow, in which the daemon
does nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from .leaves import Span

PARTS: Final = 64


class Past:
    """Spans that are remembered."""

    def __init__(self) -> None:
        self._parts: list[OrderedDict[bytes, Span]] = [OrderedDict() for _ in range(PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Span]:
        for part in self._parts:
            yield from part.values()

    def get(self, key: bytes) -> Span | None:
        return self._part(key).get(key)

    def pop(self, key: bytes) -> Span | None:
        """Forgets the span with that key, if it was remembered."""
        return self._part(key).pop(key, None)

    def add(self, span: Span, most: int) -> Iterator[Span]:
        """Remembers a span whose key is not remembered. Tells whom it forgets, so that no part holds more than its part
        of `most`, and one."""
        part = self._part(span.key)
        part[span.key] = span
        while len(part) > most // PARTS + 1:
            yield part.popitem(last=False)[1]

    def check_invariants(self) -> None:
        """Asserts that everybody is where he is looked for."""
        for part in self._parts:
            assert all(span.key == key and self._part(key) is part for key, span in part.items())

    def _part(self, key: bytes) -> OrderedDict[bytes, Span]:
        return self._parts[crc32(key) % PARTS]
