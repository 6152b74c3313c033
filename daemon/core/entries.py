"""The tables of stored entries: by key, by number and by namespace, and in an order for paging.

Owns the table of published entries and of victims. Does not own their bytes or spans.

Invariants: a key has at most one entry, published or hidden; look-ups find published ones only. A hidden entry keeps
its place in the order of publication (`sequence`). Each operation is O(1), except a page, which costs about as much as
it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final

from ...shm.layout import KEY_BYTES, NAMESPACE_TAG_BYTES

_SHELF_BITS: Final = 12
_DIRECT_MAX: Final = 2048
LOOKS_MAX: Final = 4096
"""Entries that one page examines: 1 to 2 ms."""


class EntryState(Enum):
    """The state of a span: being filled, published, hidden until a scan decides, or ended."""

    FILLING = "filling"
    LIVE = "live"
    VICTIM = "victim"
    RETIRED = "retired"


@dataclass(slots=True, eq=False)
class SpanEntry:
    """One allocated span and its entry. Times are seconds of the store's clock.

    `number`: the id of the entry's first span; a move to another span does not change it. `worth`: the entry's worth to
    the policy when it ended; 0 until then. `parent`: the entry that this one does not outlive; `child_count`: the
    number of its published children. All children, hidden ones included, form a linked list: `newest_child` is its
    head, `sibling` the next older child of the same parent, `sibling_before` the next newer one. `depth`: the number of
    ancestors; `before_bytes`: the total bytes of the ancestors. Only `sequences` changes these fields.

    `offered`: the entry waits to be written to the remote store, or was (`remote.writes`). `not_worth`: it was quicker
    to compute than to read back when that was decided last.

    `may_go`: the policy was told that the entry is evictable; `set_aside`: the entry is known to be in use. Only
    `eviction_order` changes these two.
    """

    key: bytes
    span_id: int
    slot: int
    offset: int
    span_bytes: int
    payload_bytes: int
    tree_bytes: int
    tokens: int
    owner_uid: int
    created_at: float
    ttl_s: float | None = None
    expires_at: float | None = None
    used_at: float = 0.0
    uses: int = 0
    sequence: int = 0
    state: EntryState = EntryState.FILLING
    reason: str = ""
    worth: float = 0.0
    cost_ms: float = 0.0
    agent: str = ""
    prefix_bytes: int = 0
    parent: SpanEntry | None = field(default=None, repr=False)
    child_count: int = 0
    newest_child: SpanEntry | None = field(default=None, repr=False)
    sibling: SpanEntry | None = field(default=None, repr=False)
    sibling_before: SpanEntry | None = field(default=None, repr=False)
    depth: int = 0
    before_bytes: int = 0
    may_go: bool = False
    set_aside: bool = False
    offered: bool = False
    not_worth: bool = False
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.span_id

    def copied_to(self, span_id: int, slot: int, offset: int) -> SpanEntry:
        """The span that a copy of the entry's bytes is made in. It is no entry, so it has no parent and no children."""
        return SpanEntry(
            self.key,
            span_id,
            slot,
            offset,
            self.span_bytes,
            self.payload_bytes,
            self.tree_bytes,
            0,
            self.owner_uid,
            self.created_at,
            state=EntryState.RETIRED,
            reason="moved",
        )

    @property
    def tag(self) -> bytes:
        """The tag of the namespace, from the key."""
        return self.key[:NAMESPACE_TAG_BYTES]


@dataclass(slots=True)
class Outcome:
    """The decisions of one scan. `victims`: entries that ended as victims; `freed`: spans that may be reused;
    `republished`: victims that are published again; `kept`: spans that are pinned and wait for the next scan."""

    victims: list[SpanEntry] = field(default_factory=list)
    freed: list[SpanEntry] = field(default_factory=list)
    republished: list[SpanEntry] = field(default_factory=list)
    kept: int = 0


@dataclass(frozen=True, slots=True)
class PendingMove:
    """An entry's bytes are being copied from the span of `source` to the span of `copy`. `copy` describes the new span
    only; it is no entry."""

    source: SpanEntry
    copy: SpanEntry


class EntryTable:
    """The tables. From an entry's publication on, only this class sets its `state`."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, SpanEntry] = {}
        self._hidden: dict[bytes, SpanEntry] = {}
        self._by_number: dict[int, SpanEntry] = {}
        self._by_tag: dict[bytes, dict[int, SpanEntry]] = {}
        self._shelves: dict[int, dict[bytes, SpanEntry]] = {}
        self._last_sequence = 0

    def __len__(self) -> int:
        """The number of published entries."""
        return len(self._by_key)

    @property
    def last_sequence(self) -> int:
        """The place of the newest entry in the order of publication."""
        return self._last_sequence

    @property
    def namespace_count(self) -> int:
        return len(self._by_tag)

    def tags(self) -> Iterator[bytes]:
        """The namespaces with entries."""
        return iter(self._by_tag)

    def find(self, key: bytes) -> SpanEntry | None:
        """The published entry of a key."""
        return self._by_key.get(key)

    def hidden(self, key: bytes) -> SpanEntry | None:
        """The victim of a key; it may be published again."""
        return self._hidden.get(key)

    def numbered(self, number: int) -> SpanEntry | None:
        """The entry with this number, published or hidden."""
        return self._by_number.get(number)

    def add(self, entry: SpanEntry) -> None:
        """Adds a new entry and publishes it. A victim of the same key must have been removed."""
        assert entry.key not in self._hidden, "published although a victim of the same key may be republished"
        self._last_sequence += 1
        entry.sequence = self._last_sequence
        self._by_number[entry.number] = entry
        self._by_tag.setdefault(entry.tag, {})[entry.number] = entry
        self.show(entry)

    def hide(self, entry: SpanEntry) -> None:
        """A published entry becomes a victim."""
        entry.state = EntryState.VICTIM
        assert entry.key not in self._hidden, "two victims of one key"
        self._hidden[entry.key] = entry
        del self._by_key[entry.key]
        number = _shelf_number(entry.key)
        del self._shelves[number][entry.key]
        if not self._shelves[number]:
            del self._shelves[number]

    def show(self, entry: SpanEntry) -> None:
        """Publishes a victim or a new entry."""
        assert entry.key not in self._by_key, "published twice"
        entry.state = EntryState.LIVE
        self._hidden.pop(entry.key, None)
        self._by_key[entry.key] = entry
        self._shelves.setdefault(_shelf_number(entry.key), {})[entry.key] = entry

    def remove(self, entry: SpanEntry) -> None:
        """Removes the entry. Its span may stay allocated for a while."""
        if entry.state is EntryState.LIVE:
            self.hide(entry)
        entry.state = EntryState.RETIRED
        del self._hidden[entry.key]
        del self._by_number[entry.number]
        same = self._by_tag[entry.tag]
        del same[entry.number]
        if not same:
            del self._by_tag[entry.tag]

    def first(self, tag: bytes | None, up_to: int, most: int) -> list[SpanEntry]:
        """Up to `most` entries of a namespace (or of all), victims included, oldest first, none newer than `up_to`."""
        table = self._by_number if tag is None else self._by_tag.get(tag, {})
        return [entry for entry in islice(table.values(), most) if entry.sequence <= up_to]

    def page(
        self, after: bytes | None, most: int, tag: bytes | None, looks: int = LOOKS_MAX
    ) -> tuple[list[SpanEntry], bytes | None]:
        """Published entries after the key `after`, in an order that does not change: up to `most` of them, from about
        `looks` examined entries.

        Returns:
            The entries, and the key from which to continue; None at the end.
        """
        start = None if after is None else _order(after)
        same = self._by_tag.get(tag, {}) if tag is not None else None
        if same is not None and len(same) <= _DIRECT_MAX:
            live = [e for e in same.values() if e.state is EntryState.LIVE]
            found = list(islice(_behind(live, start), most))
            return found, found[-1].key if len(found) == most else None
        found = []
        first = 0 if after is None else _shelf_number(after)
        for number in range(first, 1 << _SHELF_BITS):
            shelf = self._shelves.get(number)
            if shelf is None:
                continue
            live = [e for e in shelf.values() if tag is None or e.tag == tag]
            found += islice(_behind(live, start), most - len(found))
            looks -= len(shelf)
            if len(found) >= most:
                return found, found[-1].key
            if looks <= 0:
                return found, _end_of_shelf(number)
        return found, None

    def sample(self, key: bytes, most: int) -> list[SpanEntry]:
        """Up to `most` published entries from the key's shelf and the shelves after it, wrapping around at the end. The
        shelf follows from the digest, which is unrelated to age, size and use, so this is a fair sample. It mostly
        contains the key's own entry."""
        found: list[SpanEntry] = []
        first = _shelf_number(key)
        for number in (*range(first, 1 << _SHELF_BITS), *range(first)):
            shelf = self._shelves.get(number)
            if shelf is not None:
                found += islice(shelf.values(), most - len(found))
                if len(found) == most:
                    break
        return found

    def __iter__(self) -> Iterator[SpanEntry]:
        """Every entry, published or hidden. It walks all of them: for tests and recovery only."""
        return iter(self._by_number.values())

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        live = {e.key: e for e in self._by_number.values() if e.state is EntryState.LIVE}
        assert self._by_key == live
        hidden = {e.key: e for e in self._by_number.values() if e.state is EntryState.VICTIM}
        assert self._hidden == hidden
        assert len(hidden) + len(live) == len(self._by_number)
        assert not hidden.keys() & live.keys(), "a key is published, and may be republished"
        assert {k: e for shelf in self._shelves.values() for k, e in shelf.items()} == live
        sequences = [e.sequence for e in self._by_number.values()]
        assert sequences == sorted(sequences), "the order of publication was lost"
        assert len(set(sequences)) == len(sequences)
        for number, entry in self._by_number.items():
            assert entry.number == number
            assert entry.state in (EntryState.LIVE, EntryState.VICTIM)
            assert self._by_tag[entry.tag][number] is entry
        assert sum(map(len, self._by_tag.values())) == len(self._by_number)
        assert all(self._by_tag.values())


def _order(key: bytes) -> bytes:
    """The digest first and the namespace last, so that the entries of one namespace spread over all shelves."""
    return key[NAMESPACE_TAG_BYTES:] + key[:NAMESPACE_TAG_BYTES]


def _shelf_number(key: bytes) -> int:
    first = int.from_bytes(key[NAMESPACE_TAG_BYTES : NAMESPACE_TAG_BYTES + 2], "big")
    return first >> (16 - _SHELF_BITS)


def _end_of_shelf(number: int) -> bytes:
    """A key after all keys of the shelf, and before those of the next shelf."""
    last = ((number + 1) << (16 - _SHELF_BITS)) - 1
    return b"\xff" * NAMESPACE_TAG_BYTES + last.to_bytes(2, "big") + b"\xff" * (KEY_BYTES - NAMESPACE_TAG_BYTES - 2)


def _behind(entries: list[SpanEntry], start: bytes | None) -> Iterator[SpanEntry]:
    ordered = sorted(((_order(e.key), e) for e in entries), key=lambda pair: pair[0])
    return (entry for order, entry in ordered if start is None or order > start)
