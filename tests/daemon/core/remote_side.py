"""A remote store and the threads before it, played by the test."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Any

from tensord.daemon.forms.effects import (
    AskGenerations,
    RaiseGeneration,
    ReadRemote,
    RemoteTurned,
    RemoveRemote,
    SaveRemote,
    Seek,
    WithdrawClaim,
)
from tensord.daemon.forms.events import Event, RemoteDone, RemoteEntry, RemoteSaved, Sought
from tensord.errors import TensordError
from tensord.shm.index.keys import generation_of
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader


class RemoteSide:
    """`remote`: what is in the store, whichever daemon runs."""

    bytes: bytearray
    now: float

    def __init__(self) -> None:
        self.remote: dict[bytes, RemoteEntry] = {}
        self.remote_generations: dict[bytes, int] = {}
        self.others: dict[bytes, float] = {}
        """When another host has claimed a key there."""
        self.withdrawn: list[bytes] = []
        self.turned: dict[str, list[str]] = {"store": [], "writes": []}
        """Why the store was left alone, and the like; empty when it served again."""

    def forget_remote(self) -> None:
        """Nothing is under way."""
        self.seeks: deque[Seek] = deque()
        self.reads: deque[tuple[ReadRemote, RemoteEntry]] = deque()
        """With what each finds."""
        self.writes: deque[tuple[SaveRemote | RemoveRemote, bytes]] = deque()
        """With the bytes that each must find in the ring."""
        self.generation_requests: deque[AskGenerations | RaiseGeneration] = deque()

    def do(self, event: Event) -> None:
        raise NotImplementedError

    def touch(self, offset: int, size_bytes: int) -> None:
        raise NotImplementedError

    def header(self, offset: int) -> SpanHeader:
        raise NotImplementedError

    def take_remote(self, effect: Any) -> None:
        """Keeps an effect for later, or carries it out."""
        match effect:
            case Seek():
                self.seeks.append(effect)
            case ReadRemote():
                self.reads.append((effect, self.remote[effect.key]))
            case SaveRemote(key, offset, payload_bytes):
                assert self.header(offset).key == key
                start = offset + SPAN_HEADER_BYTES
                self.writes.append((effect, bytes(self.bytes[start : start + payload_bytes])))
            case RemoveRemote():
                self.writes.append((effect, b""))
            case WithdrawClaim():
                self.withdrawn.append(effect.key)
                self.do(RemoteDone(effect, True))
            case AskGenerations() | RaiseGeneration():
                self.generation_requests.append(effect)
            case RemoteTurned(why, what, first):
                self.turned[what].append("reached for the first time" if first else why)
            case _:
                raise AssertionError(effect)

    @property
    def remote_waits(self) -> bool:
        return bool(self.seeks or self.reads or self.writes or self.generation_requests)

    def settle_remote(self) -> None:
        while self.seeks:
            self.seek()
        while self.reads:
            self.read_remote()
        while self.writes:
            self.write_remote()
        while self.generation_requests:
            self.answer_generations()

    def seek(self, at: int = 0, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the at-th Seek, after so many seconds."""
        effect = self.seeks[at]
        del self.seeks[at]
        self.now += answer_s
        if error is not None:
            self.do(RemoteDone(effect, error=error))
            return
        first, generation = effect.keys[0], self._generation(effect)
        shared = generation == generation_of(first)
        there = takewhile(lambda each: each in self.remote, effect.keys) if shared else ()
        found = tuple(self.remote[each] for each in there)
        asks_claim = shared and not found and effect.claims_s > 0
        others_s = self.now - self.others[first] if asks_claim and first in self.others else None
        claimed = asks_claim and others_s is None
        self.do(RemoteDone(effect, Sought(generation, found, answer_s, claimed, others_s)))

    def read_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """The at-th read is carried out, or fails halfway."""
        effect, found = self.reads[at]
        del self.reads[at]
        start, size = effect.ring_offset + SPAN_HEADER_BYTES, effect.payload_bytes
        size = size if error is None else size // 2
        self.touch(start, size)
        self.bytes[start : start + size] = effect.key[8:9] * size
        self.do(RemoteDone(effect, found if error is None else None, error))

    def write_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th write to the remote store out, or has it fail."""
        effect, content = self.writes[at]
        del self.writes[at]
        if isinstance(effect, RemoveRemote):
            for key in effect.keys if error is None else ():
                self.remote.pop(key, None)
            self.do(RemoteDone(effect, error=error))
            return
        start = effect.offset + SPAN_HEADER_BYTES
        self.touch(effect.offset, SPAN_HEADER_BYTES + effect.payload_bytes)
        assert self.bytes[start : start + effect.payload_bytes] == content, "a span changed under a write"
        if error is not None:
            self.do(RemoteDone(effect, error=error))
            return
        generation = self._generation(effect)
        written = generation == generation_of(effect.key)
        if written:
            header = self.header(effect.offset)
            sizes = header.payload_bytes, header.tree_bytes, header.tokens
            self.remote[effect.key] = RemoteEntry(*sizes, header.cost_ms, parent=header.parent)
        self.do(RemoteDone(effect, RemoteSaved(generation, written)))

    def answer_generations(self, error: TensordError | None = None) -> None:
        """The remote store answers the oldest request about generations."""
        effect = self.generation_requests.popleft()
        if isinstance(effect, AskGenerations):
            told = {} if error else {tag: self.remote_generations.get(tag, 0) for tag in effect.tags}
            self.do(RemoteDone(effect, told, error))
            return
        if error is None:
            known = self.remote_generations.get(effect.tag, 0)
            if effect.new or known < effect.least:
                self.remote_generations[effect.tag] = max(known + 1, effect.least)
        self.do(RemoteDone(effect, None if error else self.remote_generations[effect.tag], error))

    def _generation(self, effect: Seek | SaveRemote) -> int:
        """The remote store's generation of a key's namespace."""
        name = effect.keys[0] if isinstance(effect, Seek) else effect.key
        return self.remote_generations.get(name[:8], 0)
