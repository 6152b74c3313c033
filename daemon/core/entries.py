"""What is stored: entries by key, by span and by namespace, and in an order that can be paged.

Owns the table of published entries and of those hidden while a scan decides about them; owns none of their bytes.

Invariants: a key has at most one entry, published or hidden, and only a published one is found; an entry keeps its
place in the order of publication (`sequence`) while it is hidden. Every operation is O(1), a page costs what it returns
and little more.
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
"""Entries that one page looks at: 1 to 2 ms."""


class EntryState(Enum):
    """The life of a span's entry."""

    FILLING = "filling"
    LIVE = "live"
    VICTIM = "victim"
    RETIRED = "retired"


@dataclass(slots=True, eq=False)
class SpanEntry:
    """One allocated span and what is known of it. Times are seconds of the store's clock.

    `number` is the id of the first span that the entry had: it stays when the entry is moved to another span.
    `worth`: what the entry was worth to the policy when it went; 0 until then.
    `parent`: the parent block, in a cached sequence; `child_count`: how many published entries have this one for
    parent. Those, and hidden ones, are a list: `newest_child` is the newest of them, `sibling` the next older one of
    the same parent. `depth` blocks of `before_bytes` come before it. Who changes all of these is `sequences`.

    `may_go`: whether the policy takes it for one that may go; `set_aside`: it is known that it may not. Only
    `eviction_order` changes them.
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
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.span_id

    @property
    def tag(self) -> bytes:
        """The namespace's tag, as the key carries it."""
        return self.key[:NAMESPACE_TAG_BYTES]


class EntryTable:
    """The tables. `entry.state` is set here, and nowhere else, once an entry is published."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, SpanEntry] = {}
        self._hidden: dict[bytes, SpanEntry] = {}
        self._by_number: dict[int, SpanEntry] = {}
        self._by_tag: dict[bytes, dict[int, SpanEntry]] = {}
        self._shelves: dict[int, dict[bytes, SpanEntry]] = {}
        self._last_sequence = 0

    def __len__(self) -> int:
        """How many are published."""
        return len(self._by_key)

    @property
    def last_sequence(self) -> int:
        """The newest entry's place in the order of publication."""
        return self._last_sequence

    @property
    def namespace_count(self) -> int:
        return len(self._by_tag)

    def find(self, key: bytes) -> SpanEntry | None:
        """The published entry of a key."""
        return self._by_key.get(key)

    def hidden(self, key: bytes) -> SpanEntry | None:
        """The victim of a key, which may be published again."""
        return self._hidden.get(key)

    def numbered(self, number: int) -> SpanEntry | None:
        """The entry of a number, published or hidden."""
        return self._by_number.get(number)

    def add(self, entry: SpanEntry) -> None:
        """A new entry, published. A victim of its key must be removed before."""
        assert entry.key not in self._hidden, "published while a victim may come back"
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
        """A victim (or a new entry) is published."""
        assert entry.key not in self._by_key, "published twice"
        entry.state = EntryState.LIVE
        self._hidden.pop(entry.key, None)
        self._by_key[entry.key] = entry
        self._shelves.setdefault(_shelf_number(entry.key), {})[entry.key] = entry

    def remove(self, entry: SpanEntry) -> None:
        """The entry is stored no more; its span may be for a while."""
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
        """Published entries behind the key `after`, in an order that does not change: up to `most` of them, among about
        `looks` entries.

        Returns:
            The entries, and the key behind which to go on; None where nothing more comes.
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
        """Up to `most` published entries whose digests come after the key's, from the first on again after the last. As
        a digest says nothing of its entry, they are a fair sample; the key's own entry is mostly among them."""
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
        """Every entry, published or hidden. For tests and recovery: it walks them all."""
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
    """Digest first, namespace last, so that one namespace's entries spread over all shelves."""
    return key[NAMESPACE_TAG_BYTES:] + key[:NAMESPACE_TAG_BYTES]


def _shelf_number(key: bytes) -> int:
    first = int.from_bytes(key[NAMESPACE_TAG_BYTES : NAMESPACE_TAG_BYTES + 2], "big")
    return first >> (16 - _SHELF_BITS)


def _end_of_shelf(number: int) -> bytes:
    """A key behind all that stand on the shelf, and before those on the next one."""
    last = ((number + 1) << (16 - _SHELF_BITS)) - 1
    return b"\xff" * NAMESPACE_TAG_BYTES + last.to_bytes(2, "big") + b"\xff" * (KEY_BYTES - NAMESPACE_TAG_BYTES - 2)


def _behind(entries: list[SpanEntry], start: bytes | None) -> Iterator[SpanEntry]:
    ordered = sorted(((_order(e.key), e) for e in entries), key=lambda pair: pair[0])
    return (entry for order, entry in ordered if start is None or order > start)
