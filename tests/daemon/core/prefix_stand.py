"""A prefix index with everything around it played by the test: the ring, and a client that cuts sequences into blocks.

What is removed is overwritten in the ring, so that an index that still reads it gives itself away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensord.daemon.core.prefix_index import Found, PrefixIndex
from tensord.ipc.layers import Layer, can_rewind_to, layout
from tensord.shm.layout import NAMESPACE_TAG_BYTES
from tensord.shm.prefix import Media, PrefixRecord, Tokens, fold, kept

TAG = b"namespac"
assert len(TAG) == NAMESPACE_TAG_BYTES
SCOPE = b"generation one  "


def item(modality: str, start: int, length: int, content: int = 0) -> Media:
    assert modality in ("image", "audio", "video")
    return Media(start, length, modality, hashlib.sha256(b"%d" % content).digest())  # type: ignore[arg-type]


@dataclass(slots=True)
class Stored:
    """A block that the index knows."""

    key: bytes
    record: PrefixRecord
    at: int
    text: bytes
    parent: bytes | None
    children: list[bytes] = field(default_factory=list)
    hidden: bool = False
    detached: bool = False


@dataclass(slots=True)
class Put:
    """A sequence that was put, and the keys of its blocks: snapshots by their positions."""

    tokens: list[int]
    media: list[Media]
    layers: list[Layer]
    blocks: list[bytes]
    snapshots: dict[int, bytes]


class PrefixStand:
    def __init__(self, *, block_tokens: int = 16, checkpoint_tokens: int = 1024, seed: int = 5) -> None:
        self.block_tokens = block_tokens
        self.ring = bytearray(1 << 16)
        self.end = 64
        self.reads = 0
        self.gone: set[int] = set()
        self.index = PrefixIndex(self.read, seed, checkpoint_tokens=checkpoint_tokens)
        self.stored: dict[bytes, Stored] = {}

    def read(self, at: int, size: int) -> memoryview:
        assert at > 0 and at + size <= self.end, (at, size)
        assert at not in self.gone, "of a block that was removed"
        self.reads += 1
        return memoryview(self.ring)[at : at + size]

    def write(self, key: bytes, record: PrefixRecord, folded: Tokens) -> int:
        """Puts a record into the ring; where its text stands."""
        packed = record.pack(folded).tobytes()
        at, self.end = self.end, self.end + -(-len(packed) // 64) * 64
        if self.end > len(self.ring):
            self.ring = self.ring + bytearray(max(len(self.ring), self.end))
        self.ring[at : at + len(packed)] = packed
        return at + record.text_at

    def add(self, key: bytes, record: PrefixRecord, folded: Tokens) -> None:
        at = self.write(key, record, folded)
        self.index.add(key, record, at)
        before = self.stored[record.parent] if record.parent is not None else None
        self.stored[key] = Stored(key, record, at, folded.tobytes(), record.parent)
        if before is not None:
            before.children.append(key)
            self.stored[key].detached = before.detached

    def put(
        self,
        tokens: Iterable[int],
        layers: Sequence[Layer] | None = None,
        media: Sequence[Media] = (),
        *,
        scope: bytes = SCOPE,
        tag: bytes = TAG,
        salt: bytes = b"",
    ) -> Put:
        """As a client does, which goes on until it meets a victim; `salt`: one whose keys are others. Where a snapshot
        is needed, one is put at every position to which all layers can rewind; not where blocks suffice."""
        tokens = list(tokens)
        layers = [Layer("normal", len(tokens))] if layers is None else list(layers)
        size = self.block_tokens
        digest, exact = layout(layers, size)
        folded = fold(np.array(tokens, np.uint32), media)
        kept_at = {position for layer in layers for position in layer.snapshots} | {len(tokens)}
        snapshots = sorted(at for at in kept_at if exact and all(can_rewind_to(layer, at) for layer in layers))
        put = Put(tokens, list(media), layers, [], {})
        parent: bytes | None = None
        chain = hashlib.sha256(salt + scope + digest)
        for start in range(0, len(tokens), size):
            part = folded[start : start + size]
            begun = tuple(item for item in media if start <= item.start < start + len(part))
            record = PrefixRecord(scope, digest, exact, False, start, len(part), parent, begun, size)
            chain.update(part.tobytes() + repr(begun).encode() + b"%d" % len(part))
            key = tag + chain.digest()[:24]
            put.blocks.append(key)
            if key not in self.stored:
                self.add(key, record, part)
            elif self.stored[key].hidden:
                break
            for at in snapshots:
                if start < at <= start + len(part):
                    put.snapshots[at] = self.snap(key, at)
            parent = key
        return put

    def snap(self, block: bytes, at: int) -> bytes:
        """Stores a snapshot that stands at `at` in `block`."""
        before = self.stored[block].record
        key = block[:8] + hashlib.sha256(block + b"%d" % at).digest()[:24]
        if key not in self.stored:
            record = PrefixRecord(
                before.scope, before.layout, before.exact, True, at, 0, block, (), before.block_tokens
            )
            self.add(key, record, np.zeros(0, np.uint32))
        return key

    def ask(
        self, tokens: Iterable[int], media: Sequence[Media] = (), *, scope: bytes = SCOPE, tag: bytes = TAG
    ) -> Found:
        tokens = np.array(list(tokens), np.uint32)
        query = PrefixRecord(scope, bytes(16), False, False, 0, len(tokens), None, tuple(media), self.block_tokens)
        folded = fold(tokens, media)
        found = self.index.match(tag, query, folded)
        self.check(found, folded, scope)
        return found

    def check(self, found: Found, folded: Tokens, scope: bytes) -> None:
        """What holds of every answer: its blocks are those of one path, live, and have what was asked for."""
        assert 0 <= found.offset < max(1, len(folded))
        if not found.offset:
            assert found == (0, [], None)
            return
        blocks = [self.stored[key] for key in found.blocks]
        assert not any(one.hidden or one.detached for one in blocks)
        assert [one.parent for one in blocks] == [None, *found.blocks[:-1]]
        size = blocks[0].record.block_tokens
        assert len(blocks) == -(-found.offset // size)
        text = b"".join([one.text for one in blocks])[: found.offset * 4]
        assert text == folded[: found.offset].tobytes()
        assert all(one.record.scope == scope and one.record.layout == blocks[0].record.layout for one in blocks)
        if found.snapshot is not None:
            snapshot = self.stored[found.snapshot]
            assert snapshot.record.snapshot and snapshot.record.start == found.offset
            assert not snapshot.hidden and not snapshot.detached
            assert snapshot.record.layout == blocks[0].record.layout
        else:
            assert not blocks[0].record.exact

    def is_live(self, key: bytes) -> bool:
        stored = self.stored.get(key)
        return stored is not None and not stored.hidden and not stored.detached

    def is_leaf(self, key: bytes) -> bool:
        """Whether nothing follows it that is not a victim."""
        leaf = all(self.stored[other].hidden for other in self.stored[key].children)
        assert leaf == (not self.index.children(key))
        return leaf

    def hide(self, key: bytes) -> None:
        self.index.hide(key)
        self.stored[key].hidden = True

    def show(self, key: bytes) -> None:
        self.index.show(key)
        self.stored[key].hidden = False

    def remove(self, key: bytes) -> list[bytes]:
        """Ends a block and overwrites it; what followed it directly, which is still known."""
        followed = self.index.remove(key)
        stored = self.stored.pop(key)
        assert sorted(followed) == sorted(stored.children)
        size = stored.record.record_bytes
        if stored.text:
            self.gone.add(stored.at)
        self.ring[stored.at - stored.record.text_at : stored.at - stored.record.text_at + size] = b"\xee" * size
        if stored.parent in self.stored and key in self.stored[stored.parent].children:
            self.stored[stored.parent].children.remove(key)
        behind = list(followed)
        while behind:
            other = self.stored[behind.pop()]
            other.detached = True
            behind += other.children
        return followed

    def remove_all(self, key: bytes) -> None:
        """Ends a block and what follows it."""
        behind = [key]
        while behind:
            behind += self.remove(behind.pop())


def still_to_encode(offset: int, media: Sequence[Media]) -> dict[str, int]:
    return {str(modality): number for modality, number in kept(offset, media).items()}
