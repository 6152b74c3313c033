"""A daemon that a client has filled with sequences: times a whole call and a restart.

Owns: the daemon, the client, and the timing. Does not own: the sequences (forest.py).

Payloads are tiny, so that a moderate ring holds many sequences. A match moves no payload.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from peers.tensord_peer import WAIT_S, serving

import tensord
from sequences.forest import Forest
from tensord.shm.payloads.prefix import PrefixRecord, Tokens

_RING_BYTES: Final = 512 << 20
_RING_BYTES_FEW: Final = 32 << 20  # a ring that is ready at once
_FEW: Final = 100
_ENTRIES: Final = 200_000
_PROBES: Final = 50
_NOBODY: Final = bytes(32)
_TOGETHER: Final = 4
_ATTEMPT_S: Final = 0.2
_PAUSE_S: Final = 0.005
_REBUILT_S: Final = 120.0


@dataclass(frozen=True)
class Restart:
    """The times from the start of a new daemon over the old one's memory.

    Args:
        served_s: until the daemon accepted a client.
        first_match_s: until a first query was a hit.
        whole_s: until all queries had the same answers as before.
    """

    served_s: float
    first_match_s: float
    whole_s: float
    blocks: int

    def __str__(self) -> str:
        served_ms, first_ms, whole_ms = self.served_s * 1e3, self.first_match_s * 1e3, self.whole_s * 1e3
        each_us = (self.whole_s - self.served_s) / self.blocks * 1e6
        return (
            f"a client is served {served_ms:.0f} ms after the start, its first match answered at {first_ms:.0f} ms; "
            f"all {self.blocks:,} blocks are matched at {whole_ms:.0f} ms, {each_us:.1f} µs each since it is served"
        )


class Served:
    """A private daemon with all sequences of a forest, and a client."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.sequences = len(forest)
        self.blocks = sum(1 for number in range(len(forest)) for _ in forest.blocks(number))
        self.filled_s = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            ring_bytes = _RING_BYTES if len(self.forest) > _FEW else _RING_BYTES_FEW
            self._daemon = stack.enter_context(serving(ring_bytes, "--max-entries", str(_ENTRIES)))
            client = tensord.Client(self._daemon.socket, name="bench-prefix", timeout_s=WAIT_S, required=True)
            stack.enter_context(client)
            self._socket = self._daemon.socket
            self._client = client
            self._cache = self._cache_of(client)
            self._fill()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def match_ns(self, query: tuple[PrefixRecord, Tokens], *, views: bool = False) -> int:
        """The duration of a whole call and its release; with `views`, it includes the views of all blocks."""
        record, tokens = query
        before = time.perf_counter_ns()
        match = self._cache.match(tokens, media=record.media)
        if match is not None:
            with match:
                if views:
                    _ = match.layers
        return time.perf_counter_ns() - before

    def ping_ns(self) -> int:
        """The duration of a request that needs no work of the daemon."""
        before = time.perf_counter_ns()
        self._client.touch(_NOBODY)
        return time.perf_counter_ns() - before

    def restart(self) -> Restart:
        """Kills the daemon, starts another, and asks until every query matches as before. Raises RuntimeError."""
        probes = [self.forest.going_on() for _ in range(_PROBES)]
        waiting = [(query, self._offset(self._cache, query)) for query in probes]
        waiting = [(query, expected) for query, expected in waiting if expected]
        served_s = first_s = 0.0
        began = time.perf_counter()
        self._daemon.start_again()
        with tensord.Client(self._socket, name="bench-again", timeout_s=_ATTEMPT_S) as client:
            cache = self._cache_of(client)
            while waiting:
                some = waiting[:_TOGETHER]
                if not served_s and client.wait_connected(_PAUSE_S):
                    served_s = time.perf_counter() - began
                offsets = [self._offset(cache, query) for query, _ in some]
                since_s = time.perf_counter() - began
                if not first_s and any(offsets):
                    first_s = since_s
                missing = [each for each, offset in zip(some, offsets, strict=True) if offset != each[1]]
                if missing and since_s > _REBUILT_S:
                    raise RuntimeError(f"{len(waiting)} matches did not come back within {_REBUILT_S:g} s")
                waiting = missing + waiting[_TOGETHER:]
        return Restart(served_s, first_s, time.perf_counter() - began, self.blocks)

    @staticmethod
    def _offset(cache: tensord.PrefixCache, query: tuple[PrefixRecord, Tokens]) -> int:
        record, tokens = query
        match = cache.match(tokens, media=record.media)
        if match is None:
            return 0
        with match:
            offset: int = match.offset
        return offset

    def _cache_of(self, client: tensord.Client) -> tensord.PrefixCache:
        namespace = tensord.Namespace(model="bench", revision="1", dtype="uint8", processor="none")
        return tensord.PrefixCache(client, namespace, block_tokens=self.forest.block_tokens)

    def _fill(self) -> None:
        began = time.perf_counter()
        for number in range(len(self.forest)):
            tokens = self.forest.sequence(number)
            layers = [tensord.NormalLayer(np.zeros((len(tokens), 1), np.uint8))]
            put = self._cache.put(tokens, layers, media=self.forest.media.get(number, ())).wait(WAIT_S)
            if put.error is not None:
                raise RuntimeError(f"sequence {number} was {put.state}: {put.error}")
        self.filled_s = time.perf_counter() - began
