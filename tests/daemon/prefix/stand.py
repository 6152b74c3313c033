"""A store that keeps sequences: a client that cuts them into blocks and puts these through records, and queries.

Bytes of the ring that become free are overwritten, so that an index that still reads them gives itself away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensord.daemon.prefix.index import Found
from tensord.daemon.store.table import LIVE
from tensord.shm.lanes.records import NO_KEY
from tensord.shm.payloads.prefix import LAYOUT_BYTES, Media, PrefixRecord, Tokens, block_key, fold

from ..store.rows import TAG, RowStore

SCOPE = b"generation one  "
TREE_BYTES = 64


def item(modality: str, start: int, length: int, content: int = 0) -> Media:
    assert modality in ("image", "audio", "video")
    return Media(start, length, modality, hashlib.sha256(b"%d" % content).digest())  # type: ignore[arg-type]


@dataclass(slots=True)
class PutSequence:
    """A sequence that was put, and the keys of its blocks: snapshots by their positions."""

    tokens: list[int]
    media: list[Media]
    exact: bool
    blocks: list[bytes] = field(default_factory=list)
    snapshots: dict[int, bytes] = field(default_factory=dict)


class SequenceStore:
    """`store`, and the blocks in it. `clear` says what a scan has freed."""

    def __init__(
        self,
        ring_bytes: int = 1 << 20,
        *,
        block_tokens: int = 16,
        checkpoint_tokens: int = 1024,
        seed: int = 5,
        tokens_max: int = 1 << 20,
        after: RowStore | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        if after is None:
            self.store = RowStore(ring_bytes, buckets=512, prefix_tokens_max=tokens_max)
        else:
            self.store = after.restarted(prefix_tokens_max=tokens_max)
        store, self.blocks = self.store, self.store.parts.blocks
        self.index = self.blocks.index
        # As it was made, but for the seed and the distance of checkpoints.
        self.index.__init__(store.table, store.ring, seed)  # type: ignore[misc]
        self.index._trees.checkpoint_tokens = checkpoint_tokens

    def restart(self) -> SequenceStore:
        """The store of the next daemon, over the same memory."""
        new = SequenceStore(block_tokens=self.block_tokens, after=self.store)
        for _ in new.store.recovery(1.0).steps():
            pass
        new.blocks.recovered()
        return new

    # ---- puts

    def put(
        self,
        tokens: Iterable[int],
        snapshots: Collection[int] | None = None,
        media: Sequence[Media] = (),
        layout: bytes = b"any",
    ) -> PutSequence:
        """As a client does. `snapshots`: the positions from which alone the sequence can be continued."""
        size, exact = self.block_tokens, snapshots is not None
        put = PutSequence(list(tokens), list(media), exact)
        folded = fold(np.array(put.tokens, np.uint32), media)
        about, parent = (SCOPE, layout.ljust(LAYOUT_BYTES), exact), None
        for start in range(0, len(folded), size):
            part = folded[start : start + size]
            begun = tuple(item for item in media if start <= item.start < start + len(part))
            parent = self.put_record(PrefixRecord(*about, False, start, len(part), parent, begun, size), part)
            put.blocks.append(parent)
            for at in sorted(snapshots or ()):
                if start < at <= start + len(part):
                    snapshot = PrefixRecord(*about, True, at, 0, parent, (), size)
                    put.snapshots[at] = self.put_record(snapshot, np.zeros(0, np.uint32))
        return put

    def put_record(self, record: PrefixRecord, part: Tokens) -> bytes:
        """Puts a block, or has it stay. Returns its key."""
        packed = record.pack(part).tobytes()
        key = block_key(TAG, packed)
        self.put_packed(key, packed, record.parent)
        return key

    def put_packed(self, key: bytes, packed: bytes, parent: bytes | None, size: int | None = None) -> int:
        """Puts what a client says is the record of a block. Returns the row."""
        payload = bytes(TREE_BYTES) + packed
        prefix = len(packed) if size is None else size
        return self.store.put(key, payload, parent=parent or NO_KEY, prefix=prefix, tree=TREE_BYTES)

    # ---- ends

    def row(self, key: bytes) -> int:
        """The row of a stored key, hidden or not; 0 if there is none."""
        return self.store.table.by_key.get(key) or self.store.spans.hidden.get(key, 0)

    def end_all(self, key: bytes) -> None:
        """Ends a block and what follows it, and frees what is free."""
        behind = [self.row(key)]
        while behind:
            row = behind.pop()
            behind += self.store.families.children_of(row)
            self.store.spans.end([row], "explicit")
        self.scan()

    def scan(self, pinned: Iterable[int] = ()) -> None:
        """One scan. What is free is overwritten."""
        table = self.store.table
        places = {row: (table.offsets[row], table.sizes[row]) for row in table.in_order()}
        for row in self.store.scan(pinned):
            offset, size = places[row]
            self.store.ring_memory[offset : offset + size] = b"\xee" * size

    # ---- queries

    def ask(
        self, tokens: Iterable[int], media: Sequence[Media] = (), *, scope: bytes = SCOPE, tag: bytes = TAG
    ) -> Found:
        """The answer, which is one path of published blocks with what was asked for."""
        asked = np.array(list(tokens), np.uint32)
        folded = fold(asked, media)
        found = self.index.match(tag, query(asked, media, scope, self.block_tokens), folded)
        table = self.store.table
        assert 0 <= found.offset < max(1, len(folded))
        if not found.offset:
            assert not found.blocks and not found.snapshot
            return found
        records = [self.blocks.record(row) for row in found.blocks]
        assert all(table.states[row] == LIVE for row in found.blocks)
        assert [table.parents[row] for row in found.blocks] == [0, *found.blocks[:-1]]
        first = records[0]
        assert first is not None and len(records) == -(-found.offset // first.block_tokens)
        assert all(one is not None and (one.scope, one.layout) == (scope, first.layout) for one in records)
        if found.snapshot:
            snapshot = self.blocks.record(found.snapshot)
            assert snapshot is not None and snapshot.snapshot and snapshot.start == found.offset
            assert table.states[found.snapshot] == LIVE and snapshot.layout == first.layout
        else:
            assert not first.exact
        return found

    def offset(self, tokens: Iterable[int], media: Sequence[Media] = ()) -> int:
        return self.ask(tokens, media).offset

    def check(self) -> None:
        self.store.check_invariants()
        self.blocks.check_invariants()


def query(tokens: Tokens, media: Sequence[Media] = (), scope: bytes = SCOPE, block_tokens: int = 16) -> PrefixRecord:
    return PrefixRecord(scope, bytes(16), False, False, 0, len(tokens), None, tuple(media), block_tokens)
