"""The parents and children among the entries, and the index that matches the prefixes of cached sequences.

There are two kinds of children. A block of a cached sequence has a record, and is in the prefix index; if it has a
parent, that is a block of the sequence. A chain block has no record, only the key of its parent, which may be any entry
of its namespace.

A child is useless without its parent, so children are evicted first: `eviction_order` tells policies which entries
are evictable. Code that chooses victims otherwise asks `leaves_first` for the descendants that must go before an entry,
and `ancestors` for the entries that stay because of their descendants.

The links between entries are the one record of parents and children. The prefix index has nodes of its own, ordered by
text, and gets every change of a block with a record. The nodes cannot be merged with the links: a snapshot has a link
and no node, a chain block has none either, and after a restart an entry is linked before its node is rebuilt.

Owns the links between entries (`parent`, `child_count` and the list of children), the parent keys of puts in flight,
and the prefix index. After a restart, the index is rebuilt block by block while the store already serves. Does not own
which entries are published or pinned: `span_table` reports every entry that is added, hidden, republished or removed.

Invariants: an entry is linked from its publication until its removal. A block is matched only while it and all its
ancestors are published. `child_count` counts the published children. A child whose parent was removed is matched no
more, and is about to end (`expiry`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from typing import Final

from ...errors import BadPrefix, ParentGone, TensordError
from ...shm.layout import SPAN_HEADER_BYTES, aligned
from ...shm.prefix import PrefixRecord
from .entries import EntryState, SpanEntry
from .prefix_index import PrefixIndex

REBUILD_SLICE: Final = 32
"""Blocks that one Tick puts into the index again: 1 to 3 ms."""
PATH_MAX: Final = 256
"""The longest path that a put adds to the index during the rebuild."""

Read = Callable[[int, int], bytes | memoryview]
"""(offset, bytes) → the ring's bytes at that offset."""


class Sequences:
    """The links between the entries of one ring, and the index of the blocks among them."""

    def __init__(self, read: Read, seed: int) -> None:
        self.index = PrefixIndex(read, seed)
        self.changes = 0
        """Rises whenever the set of awaited entries changes."""
        self._read = read
        self._first_blocks: dict[bytes, dict[SpanEntry, None]] = {}
        self._followed: dict[bytes, int] = {}
        self._rebuilding: dict[SpanEntry, PrefixRecord] = {}
        self._count = self._chained = self._children = 0

    def __len__(self) -> int:
        """The number of stored blocks and snapshots, all of which have a record."""
        return self._count

    @property
    def chained(self) -> int:
        """The number of stored chain blocks."""
        return self._chained

    @property
    def in_use(self) -> bool:
        """Whether an entry may be kept by a child: one has a parent, or the put of a child is in flight."""
        return bool(self._children or self._followed)

    @property
    def rebuilding(self) -> int:
        """The number of blocks that are not in the index yet after a restart."""
        return len(self._rebuilding)

    @property
    def rebuild_due(self) -> bool:
        """Whether `rebuild` has a block to add now. It has none while a scan decides about the next block."""
        return any(map(_is_published, islice(self._rebuilding, 1)))

    # ---- puts in flight

    def follow(self, key: bytes) -> None:
        """A put of a child of `key` is in flight: the entry of that key stays until `unfollow`."""
        self._followed[key] = self._followed.get(key, 0) + 1
        self.changes += 1

    def unfollow(self, key: bytes) -> None:
        """One such put has ended."""
        self._followed[key] -= 1
        if not self._followed[key]:
            del self._followed[key]
        self.changes += 1

    def is_awaited(self, entry: SpanEntry) -> bool:
        """Whether a put of a child of the entry is in flight."""
        return entry.key in self._followed

    @property
    def followed(self) -> Mapping[bytes, int]:
        """The parent keys of puts in flight and of taken spans, each with the number of these."""
        return self._followed

    # ---- changes of entries, as `span_table` reports them

    def add(self, entry: SpanEntry, record: PrefixRecord | None, parent: SpanEntry | None) -> None:
        """Links an entry that is about to be published: a block if it has a record, otherwise a chain block if it has a
        parent.

        Raises:
            BadPrefix: the block does not continue its parent.
            ParentGone: the parent is not in the index.
        """
        if record is not None:
            if parent is not None and not parent.prefix_bytes:
                raise BadPrefix("the parent of a block with a record has no record: put the block with its own parent")
            if parent is not None and not self._ensure_indexed(parent):
                raise ParentGone("the parent block is not indexed yet after a restart: put it again in a while")
            self.index.add(entry.key, record, self._text_at(entry, record))
        self._link(entry, parent)

    def add_recovered(self, entry: SpanEntry, record: PrefixRecord | None, parent: SpanEntry | None) -> None:
        """Links an entry that an earlier daemon left. A block is matched once the index contains it."""
        if record is not None:
            self._rebuilding[entry] = record
        self._link(entry, parent)

    def hide(self, entry: SpanEntry) -> None:
        """The entry was unpublished, and may be republished."""
        assert not entry.child_count, "an entry is hidden before its children"
        if entry.parent is not None:
            entry.parent.child_count -= 1
        if self._is_indexed(entry):
            self.index.hide(entry.key)

    def show(self, entry: SpanEntry) -> None:
        """The entry was republished."""
        if self.is_awaited(entry):
            self.changes += 1
        if entry.parent is not None:
            entry.parent.child_count += 1
        if self._is_indexed(entry):
            self.index.show(entry.key)

    def remove(self, entry: SpanEntry, *, published: bool) -> None:
        """The entry was removed; `published`: it was published until now. Its descendants are matched no more."""
        if published and entry.parent is not None:
            entry.parent.child_count -= 1
        self._unlink(entry)
        if self._rebuilding.pop(entry, None) is None and entry.prefix_bytes:
            self.index.remove(entry.key)

    # ---- entries that must go, or stay, together

    def leaves_first(self, entry: SpanEntry, done: Collection[SpanEntry]) -> Iterator[SpanEntry]:
        """The published descendants of `entry`, each after all its own descendants, and `entry` last.

        Skips the entries of `done` and their descendants. The caller may add the yielded entries to `done`.
        """
        if entry in done:
            return
        path, ahead = [entry], [entry.newest_child]
        while path:
            child = ahead[-1]
            while child is not None and (child.state is not EntryState.LIVE or child in done):
                child = child.sibling
            if child is None:
                ahead.pop()
                yield path.pop()
            else:
                ahead[-1] = child.sibling
                path.append(child)
                ahead.append(child.newest_child)

    def ancestors(self, entries: Iterable[SpanEntry | None]) -> set[SpanEntry]:
        """All ancestors of the entries."""
        found: set[SpanEntry] = set()
        for entry in entries if self._children else ():
            before = entry.parent if entry is not None else None
            while before is not None and before not in found:
                found.add(before)
                before = before.parent
        return found

    def hidden_ancestors(self, entry: SpanEntry) -> list[SpanEntry] | None:
        """The hidden ancestors of a hidden block, the nearest first. None if an ancestor was removed."""
        hidden: list[SpanEntry] = []
        before = entry.parent
        while before is not None and before.state is not EntryState.LIVE:
            if before.state is EntryState.RETIRED:
                return None
            hidden.append(before)
            before = before.parent
        return hidden

    def first_blocks(self, tag: bytes, up_to: int, most: int) -> list[SpanEntry]:
        """Up to `most` first blocks of a namespace's sequences, oldest first, up to the `up_to`-th published entry."""
        heads = self._first_blocks.get(tag, {})
        return list(islice(takewhile(lambda entry: entry.sequence <= up_to, heads), most))

    # ---- the index

    def record(self, entry: SpanEntry) -> PrefixRecord | None:
        """The record of a stored block; None if the entry is not a block."""
        if not entry.prefix_bytes:
            return None
        try:
            return PrefixRecord.unpack(self._read(_record_at(entry), entry.prefix_bytes))
        except TensordError:
            return None

    def rebuild(self) -> list[SpanEntry]:
        """Puts the next slice of recovered blocks into the index.

        Returns:
            The blocks that do not continue their parents. They are not matched.
        """
        first = islice(takewhile(_is_published, self._rebuilding), REBUILD_SLICE)
        return [entry for entry in list(first) if not self._rebuild(entry)]

    def check_invariants(self, entries: Iterable[SpanEntry]) -> None:
        """Asserts what the module's docstring promises, for all stored entries."""
        stored = list(entries)
        blocks = {entry for entry in stored if entry.prefix_bytes}
        children = [entry for entry in stored if entry.parent is not None]
        assert len(blocks) == self._count and len(children) == self._children
        assert self._chained == sum(not entry.prefix_bytes for entry in children)
        assert {head for heads in self._first_blocks.values() for head in heads} == {
            e for e in blocks if e.parent is None
        }
        assert all(self._first_blocks.values())
        for entry in stored:
            listed = list(_children(entry))
            assert set(listed) == {each for each in children if each.parent is entry}
            assert entry.child_count == sum(each.state is EntryState.LIVE for each in listed)
            assert entry.parent is None or entry.parent.tag == entry.tag
        for entry in blocks:
            assert entry.parent is None or entry.parent.prefix_bytes, "a block continues an entry without a record"
            assert (entry in self._rebuilding) != (entry.key in self.index), "a block is not in exactly one of the two"
        assert self._rebuilding.keys() <= blocks
        assert len(self.index) == len(blocks) - len(self._rebuilding)
        assert all(self._followed.values())
        self.index.check_invariants()

    def _ensure_indexed(self, entry: SpanEntry) -> bool:
        """Whether the entry is in the index. Adds it and its ancestors, unless they are more than PATH_MAX."""
        path: list[SpanEntry] = []
        before: SpanEntry | None = entry
        while before is not None and before in self._rebuilding:
            path.append(before)
            before = before.parent
        return len(path) <= PATH_MAX and all(map(self._rebuild, reversed(path)))

    def _rebuild(self, entry: SpanEntry) -> bool:
        """Adds a recovered block to the index; whether that succeeded."""
        record = self._rebuilding[entry]
        try:
            self.index.add(entry.key, record, self._text_at(entry, record))
        except TensordError:
            return False
        del self._rebuilding[entry]
        return True

    def _text_at(self, entry: SpanEntry, record: PrefixRecord) -> int:
        return _record_at(entry) + record.text_at

    def _is_indexed(self, entry: SpanEntry) -> bool:
        return entry.prefix_bytes > 0 and entry not in self._rebuilding

    def _link(self, entry: SpanEntry, parent: SpanEntry | None) -> None:
        self._count += entry.prefix_bytes > 0
        entry.parent = parent
        if self.is_awaited(entry):
            self.changes += 1
        if parent is None:
            if entry.prefix_bytes:
                self._first_blocks.setdefault(entry.tag, {})[entry] = None
            return
        self._children += 1
        self._chained += not entry.prefix_bytes
        parent.child_count += 1
        entry.depth, entry.before_bytes = parent.depth + 1, parent.before_bytes + parent.span_bytes
        entry.sibling = parent.newest_child
        if entry.sibling is not None:
            entry.sibling.sibling_before = entry
        parent.newest_child = entry

    def _unlink(self, entry: SpanEntry) -> None:
        self._count -= entry.prefix_bytes > 0
        if entry.parent is None:
            if entry.prefix_bytes:
                heads = self._first_blocks[entry.tag]
                del heads[entry]
                if not heads:
                    del self._first_blocks[entry.tag]
            return
        self._children -= 1
        self._chained -= not entry.prefix_bytes
        if entry.sibling_before is not None:
            entry.sibling_before.sibling = entry.sibling
        else:
            entry.parent.newest_child = entry.sibling
        if entry.sibling is not None:
            entry.sibling.sibling_before = entry.sibling_before
        entry.sibling = entry.sibling_before = None


def _is_published(entry: SpanEntry) -> bool:
    return entry.state is EntryState.LIVE


def _record_at(entry: SpanEntry) -> int:
    return entry.offset + SPAN_HEADER_BYTES + aligned(entry.tree_bytes)


def _children(entry: SpanEntry) -> Iterator[SpanEntry]:
    newest_child = entry.newest_child
    while newest_child is not None:
        yield newest_child
        newest_child = newest_child.sibling
