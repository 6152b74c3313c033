"""What lookups return: leases, which are pinned entries, and batches of them; and leases on what another process pins.

    scheduler:  lease = client.get(key); send(lease.handle())          # and keep `lease` until the worker is done
    worker:     lease = client.ring().borrow(received)                 # the pinned entry cannot be evicted

Owns: turning pinned bytes into trees. Does not own: the pin. The lane ties it to the root array, and releases it when
the last view of the payload is collected; of a borrowed lease the lender has it.
Invariants: every view of a payload keeps its root array, and so its pin, alive. A borrow reads no index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ...errors import BadTree, Corrupt, UsageError, shown
from ...shm.payloads.copy import checksum_of
from ...shm.payloads.recipe import Recipe, recipe
from ...shm.payloads.tensors import needed_torch, tensor_copy, tensor_over
from ...shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader
from ..threads.of_process import OfThisProcess, Releasable
from .ring_mapping import Handle, RingMapping, mapping_under

if TYPE_CHECKING:
    from .view import View

Array = np.ndarray[Any, Any]
_RECIPES_MAX: Final = 4096


class Lease(Releasable):
    """A pinned entry. Its views stay valid for as long as any of them lives, even after the client is closed.

    Leaving the `with` block drops only the lease's own reference. A released lease raises ValueError at any use.

    Example:
        >>> cache.put(key, {"hidden": np.arange(3)}, wait=True).state
        'stored'
        >>> with cache.get(key) as lease:
        ...     hidden = lease.tree["hidden"]
        >>> hidden, hidden.flags.writeable                         # pinned for as long as this array lives
        (array([0, 1, 2]), False)
    """

    __slots__ = ("_recipe", "_root", "payload_bytes")
    _instead = "send lease.handle() to a process of this host (RingReader.borrow), or copies of the arrays"

    def __init__(self, root: Array, recipe: Recipe, payload_bytes: int) -> None:
        """`root`: the entry's whole payload, (payload_bytes,) uint8. `payload_bytes`: its size in the ring, tree header
        and padding included."""
        self._root = root
        self._recipe = recipe
        self.payload_bytes = payload_bytes

    @property
    def tree(self) -> Any:
        """The payload as it was put. Arrays and tensors are read-only zero-copy numpy views."""
        return self._recipe.view(self._root)

    def torch(self, *, copy: bool = True) -> Any:
        """Returns the payload with torch tensors for leaves.

        Args:
            copy: False returns tensors over the shared memory itself. Torch has no read-only tensors: an in-place
                operation on such a tensor ends the process with SIGSEGV.

        Raises:
            UnsupportedLeaf: a leaf has a dtype that torch lacks.
            UsageError: torch is not installed.
        """
        return self._recipe.torch(self._root, copy=copy)

    @property
    def value(self) -> Any:
        """The payload with each leaf in the type that was put: arrays as views, tensors as copies."""
        return self._recipe.value(self._root)

    def handle(self) -> bytes | None:
        """Returns a name for the pinned bytes, with which another process of this host reads them
        (`RingReader.borrow`).

        The handle is valid for as long as this lease, or any view of it, lives, even if the entry is evicted, the
        client closed or the daemon restarted meanwhile. The handle of a borrowed lease is valid for as long as the
        original lender's lease.

        Returns:
            72 bytes, of which the first 16 are `RingReader.identity`; None if the lease is a copy.
        """
        array, offset = self._place
        mapping = mapping_under(array)
        return mapping.handle(array, offset, self.payload_bytes) if mapping is not None else None

    def span(self) -> Array | None:
        """Returns the pinned span, its header first, as a read-only uint8 array of shape (n,), valid for as long as the
        lease lives. `lease_of_copy` takes a copy of it. None if the lease is a copy."""
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
            raise ValueError("this lease was released; take the views you need before")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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


class Batch(Releasable):
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
    _instead = "see its leases"

    def __init__(self, view: View | None, root: Array, found: Array, places: Array, lengths: Array) -> None:
        """`root` covers the whole ring and holds the pins of all entries that are marked in `found`."""
        self._view = view
        self._places = places
        self._lengths = lengths
        self._root: Array | None = root
        self._copies: dict[int, Lease] = {}
        self.found = found

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


class Recipes(dict[bytes, Recipe]):
    """Recipes by their tree headers, parsed at their first use. Looking up bytes that are no header raises BadTree."""

    def __missing__(self, header: bytes) -> Recipe:
        if len(self) >= _RECIPES_MAX:
            self.clear()
        known = self[header] = recipe(header)
        return known


class RingReader(OfThisProcess):
    """One ring's memory. Stays usable after its client is closed, attached to another ring, or without a daemon. A
    handle that is not bytes raises UsageError.

    Example:
        >>> cache.put(key, np.arange(3), wait=True).state
        'stored'
        >>> with cache.get(key) as lender:                          # one process keeps the lease, and sends its handle
        ...     handle = lender.handle()
        ...     with cache.ring().borrow(handle) as borrowed:       # another process on the host reads the entry
        ...         borrowed.tree
        array([0, 1, 2])
    """

    __slots__ = ("_recipes", "mapping")
    _instead = "call Client.ring() in the other process"

    def __init__(self, mapped: RingMapping, recipes: Recipes) -> None:
        """`mapped`: the ring's memory, mapped read-only. `recipes`: all readers of a ring share them."""
        self.mapping = mapped
        self._recipes = recipes

    @property
    def identity(self) -> bytes:
        """16 bytes that identify the ring: the same in every process of the host, also after the daemon restarts."""
        return self.mapping.identity

    def __len__(self) -> int:
        """The bytes of the ring that are mapped."""
        return len(self.mapping)

    def borrow(self, handle: bytes) -> Lease | None:
        """Returns a lease on an entry that another process pins, without a pin, a lookup or a counted use.

        The lease is valid while the lender keeps the lease that gave the handle, or a view of it. Afterwards the bytes
        may become another entry's. So the lender must know when the borrower is done.

        Returns:
            The lease; None if the bytes are no handle, the handle is of another ring, or the span there does not match
            it.
        """
        named = self.mapping.named(_bytes(handle))
        if named is None:
            return None
        start, span = named
        try:
            known = self._recipes[self.mapping.copied(start, span.tree_bytes).tobytes()]
        except BadTree:
            return None
        if known.end_bytes > span.payload_bytes:
            return None
        return lease_over(self.mapping, start, span.payload_bytes, known)

    def copied(self, handle: bytes) -> Lease | None:
        """Returns a lease on a copy of a handle's entry. The copy is valid whether or not the lender keeps its lease:
        the checksum shows if another entry has replaced the bytes.

        Returns:
            None as for `borrow`, or if the bytes do not match the checksum.
        """
        named = self.mapping.named(_bytes(handle))
        if named is None:
            return None
        start, span = named
        copied = self.mapping.copied(start - SPAN_HEADER_BYTES, SPAN_HEADER_BYTES + span.payload_bytes)
        return lease_of_copy(copied, handle, self._recipes)


def _bytes(handle: object) -> bytes:
    if not isinstance(handle, bytes | bytearray | memoryview):
        raise UsageError(f"handle is {shown(handle)}; it must be bytes, as Lease.handle() returns them")
    return bytes(handle)


def lease_of_copy(span: Array, handle: bytes, recipes: Recipes) -> Lease | None:
    """A lease on a copy of a span, its header first, as uint8 of shape (n,); None if any byte differs from the handle's
    payload. Of a large entry without a checksum only key, size and tree are compared."""
    named, payload = Handle.unpack(handle), span[SPAN_HEADER_BYTES:]
    if named is None or len(payload) != named.payload_bytes:
        return None
    try:
        found = SpanHeader.unpack(span[:SPAN_HEADER_BYTES].tobytes())
        if (found.key, found.span_id, found.payload_bytes) != (named.key, named.span_id, named.payload_bytes):
            return None
        if found.checksum and checksum_of(payload) != found.checksum:
            return None
        known = recipes[payload[: found.tree_bytes].tobytes()]
    except (BadTree, Corrupt):
        return None
    if known.end_bytes > len(payload):
        return None
    payload.flags.writeable = False
    return lease_over(payload, 0, len(payload), known)
