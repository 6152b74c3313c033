"""What lookups return: leases, which are pinned entries, batches of them, and the metadata of an entry.

Owns: turning pinned bytes into trees, and reading the metadata. Does not own: the pin. The lane ties it to the root
array, and releases it when the last view of the payload is collected.
Invariants: every view of a payload keeps its root array, and so its pin, alive. The metadata pin nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import numpy as np
from msgspec import Struct

from ...errors import BadTree
from ...shm.index.index import PLACE_OFFSET_MASK, IndexReader
from ...shm.payloads.recipe import Recipe
from ...shm.payloads.tensors import needed_torch, tensor_copy, tensor_over
from ...shm.ring.layout import SPAN_HEADER_BYTES, unix_at_boot_s
from .ring_mapping import RingMapping, mapping_under

if TYPE_CHECKING:
    from .view import View

Array = np.ndarray[Any, Any]
LOOKS_MAX: Final = 4
"""How often an entry is looked up that changes while it is read."""


class Lease:
    """A pinned entry. Its views stay valid for as long as any of them lives, even after the client is closed.

    Leaving the `with` block drops only the lease's own reference.

    Example:
        >>> cache.put(key, {"hidden": np.arange(3)}, wait=True).state
        'stored'
        >>> with cache.get(key) as lease:
        ...     hidden = lease.tree["hidden"]
        >>> hidden, hidden.flags.writeable                         # pinned for as long as this array lives
        (array([0, 1, 2]), False)
    """

    __slots__ = ("_recipe", "_root", "payload_bytes")

    def __init__(self, root: Array, recipe: Recipe, payload_bytes: int) -> None:
        """`root`: the entry's whole payload, (payload_bytes,) uint8. `payload_bytes`: its size in the ring, tree header
        and padding included."""
        self._root = root
        self._recipe = recipe
        self.payload_bytes = payload_bytes

    @property
    def tree(self) -> Any:
        """The payload as it was put. Arrays and tensors are read-only zero-copy numpy views.

        Raises:
            ValueError: the lease was released.
        """
        return self._recipe.view(self._root)

    def torch(self, *, copy: bool = True) -> Any:
        """Returns the payload with torch tensors for leaves.

        Args:
            copy: False returns tensors over the shared memory itself. Torch has no read-only tensors: an in-place
                operation on such a tensor ends the process with SIGSEGV.

        Raises:
            UnsupportedLeaf: a leaf has a dtype that torch lacks.
            UsageError: torch is not installed.
            ValueError: the lease was released.
        """
        return self._recipe.torch(self._root, copy=copy)

    @property
    def value(self) -> Any:
        """The payload with each leaf in the type that was put: arrays as views, tensors as copies."""
        return self._recipe.value(self._root)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a lease pins memory for this process, so it cannot be pickled or copied: send lease.handle() to a process "
            "of this host (RingReader.borrow), or copies of the arrays"
        )

    def handle(self) -> bytes | None:
        """Returns a name for the pinned bytes, with which another process of this host reads them
        (`RingReader.borrow`).

        The handle is valid for as long as this lease, or any view of it, lives, even if the entry is evicted, the
        client closed or the daemon restarted meanwhile. The handle of a borrowed lease is valid for as long as the
        original lender's lease.

        Returns:
            72 bytes, of which the first 16 are `RingReader.identity`; None if the lease is a copy.

        Raises:
            ValueError: the lease was released.
        """
        array, offset = self._place
        mapping = mapping_under(array)
        return mapping.handle(array, offset, self.payload_bytes) if mapping is not None else None

    def span(self) -> Array | None:
        """Returns the pinned span, its header first, as a read-only uint8 array of shape (n,). `lease_of_copy` takes a
        copy of it.

        Valid for as long as the lease lives. None if the lease is a copy.

        Raises:
            ValueError: the lease was released.
        """
        array, offset = self._place
        mapping = mapping_under(array)
        if mapping is None:
            return None
        span: Array = np.ndarray(
            (SPAN_HEADER_BYTES + self.payload_bytes,), np.uint8, mapping, mapping.span_at(array, offset)
        )
        return span

    @property
    def _place(self) -> tuple[Array, int]:
        """An array of the payload, and its offset there, in bytes."""
        return self._root, 0

    def release(self) -> None:
        """Drops the lease's reference to the entry. Views that were taken before stay valid."""
        with suppress(AttributeError):
            del self._root

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that `release` deleted, so that the check costs a hit nothing.
        if name in ("_root", "tree"):
            raise ValueError("this lease was released; take the views you need before the with block ends")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


class ArrayLease(Lease):
    """A lease on a payload that is a single array or tensor. `tree` is made at once."""

    __slots__ = ("tree",)

    def __init__(self, root: Array, recipe: Recipe, payload_bytes: int) -> None:
        """`root` is the payload's array itself."""
        self.tree = root  # type: ignore[misc]  # a slot in the property's place: a hit reads it without a call
        self._recipe = recipe
        self.payload_bytes = payload_bytes

    def torch(self, *, copy: bool = True) -> Any:
        tree = self.tree  # a released lease is the first thing to say
        return (tensor_copy if copy else tensor_over)(needed_torch("lease.torch()"), tree)

    @property
    def value(self) -> Any:
        return self.torch() if self._recipe.single_is_tensor else self.tree

    @property
    def _place(self) -> tuple[Array, int]:
        single = self._recipe.single
        assert single is not None
        return self.tree, single[2]

    def release(self) -> None:
        with suppress(AttributeError):
            del self.tree


def lease_over(memory: Array | RingMapping, start: int, payload_bytes: int, known: Recipe) -> Lease:
    """A lease on the payload at `start` of `memory`: the ring, or uint8 of shape (n,). Its views keep `memory`
    alive."""
    if known.single is None:
        return Lease(np.ndarray((payload_bytes,), np.uint8, memory, start), known, payload_bytes)
    shape, dtype, offset = known.single
    return ArrayLease(np.ndarray(shape, dtype, memory, start + offset), known, payload_bytes)


class Batch:
    """The leases of `get_many`: all hits are pinned at once, and each lease is made when it is indexed.

    `found` is a bool array of shape (n,). The index is the position of a key; the items are a Lease, or None for a
    miss. The entries are pinned together: a view of one of them keeps all of them in the ring. Copy what has to live
    longer than the rest.

    Example:
        >>> cache.put(key, np.arange(3), wait=True).state
        'stored'
        >>> with cache.get_many([key, bytes(32)]) as batch:
        ...     print(batch.found, batch[0].tree, batch[1])
        [ True False] [0 1 2] None
    """

    __slots__ = ("_copies", "_lengths", "_places", "_root", "_view", "found")

    def __init__(self, view: View | None, root: Array, found: Array, places: Array, lengths: Array) -> None:
        """`root` covers the whole ring and holds the pins of all entries that are marked in `found`."""
        self._view = view
        self._places = places
        self._lengths = lengths
        self._root: Array | None = root
        self._copies: dict[int, Lease] = {}
        self.found = found

    def __reduce__(self) -> NoReturn:
        raise TypeError("a batch pins memory for this process, so it cannot be pickled or copied: see its leases")

    @classmethod
    def of_misses(cls, count: int) -> Self:
        """A batch of `count` misses. For the library."""
        nothing = np.zeros(count, np.uint64)
        return cls(None, nothing, np.zeros(count, np.bool_), nothing, nothing)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, position: int) -> Lease | None:
        if self._root is None:
            raise ValueError("this batch was released; take the leases you need before the with block ends")
        if not self.found[position] or self._view is None:
            return None
        if self._copies and (copy := self._copies.get(position % len(self))) is not None:
            return copy
        try:
            return self._view.lease_within(self._root, int(self._places[position]), int(self._lengths[position]))
        except BadTree:
            return None

    def add_copy(self, position: int, copy: Lease | None) -> None:
        """Adds a hit for which the lane had no free word. None if the entry was evicted meanwhile. For the library."""
        if copy is not None:
            self._copies[position] = copy
            self.found[position] = True

    def __iter__(self) -> Iterator[Lease | None]:
        return (self[position] for position in range(len(self)))

    def release(self) -> None:
        """Drops the batch's pins. Leases and views that were taken before stay valid."""
        self._root = None
        self._copies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


class Entry(Struct, frozen=True):
    """An entry's metadata, and how much it is shared, as the daemon last wrote it into the index.

    Times are Unix seconds by the current wall clock; `expires_unix_s` is 0 if the entry does not expire.

    `holders`: lanes that pin the entry now, counted about once a second. A lane belongs to a client with a lease or a
    view, or to a client that has ended but left live views. A client in a forked child that inherited views counts for
    two lanes: its parent's and its own. Borrowed leases, and copies made because a lane was full, are not counted.
    `uses`: how often any client got, touched or put the entry again since it was stored. The daemon updates the number
    within about a second. A restart keeps it, except for reads while no daemon ran and in the 0.1 s before. If clients
    together read faster than the daemon reads their logs (about 40,000 gets a second), the count is a sample.

    Example:
        >>> cache.put(key, np.arange(3), tokens=576, wait=True).state
        'stored'
        >>> entry = cache.peek(key)
        >>> entry.tokens, entry.expires_unix_s, entry.holders       # clients with a lease or a view of the entry
        (576, 0.0, 0)
    """

    key: bytes
    payload_bytes: int
    tokens: int
    created_unix_s: float
    expires_unix_s: float
    owner_uid: int
    checksum: int
    holders: int
    uses: int


def read_entry(index: IndexReader, ring: RingMapping, key: bytes) -> Entry | None:
    """The metadata of the key's entry. None if there is none, or its span's header is damaged."""
    for _ in range(LOOKS_MAX):
        hit = index.find(key)
        if hit is None:
            return None
        at, seq, _, place, _ = hit
        uses, holders = index.reuse(at)
        h = ring.span(place & PLACE_OFFSET_MASK)
        if index.words[at] == seq:
            if h is None:
                return None
            zero_s = unix_at_boot_s()
            expires_unix_s = zero_s + h.expires_s if h.expires_s else 0.0
            return Entry(
                h.key,
                h.payload_bytes,
                h.tokens,
                zero_s + h.created_s,
                expires_unix_s,
                h.owner_uid,
                h.checksum,
                holders,
                uses,
            )
    return None
