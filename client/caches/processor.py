"""The processor cache: outputs of image, sound and video processors, shared by all frontends and engines of a host.

A frontend is the sender: it asks which items are stored, processes the others, and sends References instead of trees.
An engine is the receiver: it turns References into trees, which are views of shared memory. There may be several of
both.

    sender     there = cache.is_cached(hashes)                       # items with True are held
               trees = [None if known else process(item) for item, known in zip(items, there)]
               sent = cache.get_and_update(trees, hashes)            # a Reference, or the tree itself
    receiver   features = cache.get_and_update_features([Feature(hash, data) for hash, data in zip(hashes, received)])

Owns: the outcome of each item, and the counts. Does not own: the entries (the daemon's), nor how long a sender holds
them (holds.py).
Invariants: neither side mirrors the state of the other. A sender refers only to entries that it holds pinned, long
enough for the receiver to read them. A receiver that misses an entry raises one `ReferenceLost` for the whole request;
then the sender calls `invalidate` and sends trees.

A sender waits for the daemon's answer to a put, which says that the entry is visible. This takes milliseconds; sending
the tree instead would take a copy too. If the answer is late, the tree is sent and the put goes on. Until it is
answered, no other item is put. So a daemon that does not answer costs one such wait, not one for each item.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final, Literal
from weakref import WeakSet

import numpy as np

from ...errors import (
    BelowFloor,
    LimitReached,
    ObjectTooLarge,
    ReferenceLost,
    StoreFull,
    TensordError,
    TimedOut,
    Unavailable,
    UnderPressure,
    UnsupportedLeaf,
    UsageError,
)
from ...shm.header import NODES_MAX
from ...shm.recipe import Recipe
from ..core.cache import Client
from ..core.fields import check_seconds
from ..core.lease import ArrayLease, Lease
from ..core.namespace import Namespace
from ..core.puts import Put
from .holds import HeldLeases
from .loans import Lender
from .measures import item_bytes, leaf_count
from .private import private_view
from .references import Reader, Reference

__all__ = ["Feature", "ProcessorCache", "Reference", "Stats", "item_bytes", "leaf_count"]

Hash = str | bytes
Copy = bool | Literal["on_write"]

# The payload has the tree and its hash. The receiver checks the hash, since the reference comes from another process.
_HASH: Final = "hash"
_TREE: Final = "tree"
_KIND: Final = "processor"
# Bytes that a daemon copies in a second on a loaded machine, at least. A large tree's answer may take this much longer.
_SLOW_BYTES_PER_S: Final = 1 << 30
_HELD_SHARE: Final = 4
_KEYS_KEPT: Final = 4096
# From this many lost items at once, all items count as missing: the receiver maps another ring, and gets trees.
_DISTRUSTED_ALL: Final = 64
_REFUSALS: Final[tuple[tuple[type[TensordError], str], ...]] = (
    (ObjectTooLarge, "too_large"),
    (UnderPressure, "pressure"),
    (StoreFull, "full"),
    (BelowFloor, "full"),
    (LimitReached, "full"),
    (UnsupportedLeaf, "unsupported"),
    (TimedOut, "late"),
    (Unavailable, "no_daemon"),
)


@dataclass(frozen=True, slots=True)
class Feature:
    """One item of a request, as the receiver gets and returns it.

    `data` is a Reference, a tree, or None for the entry stored under `hash`. In returned features it is always the
    tree.

    Example:
        >>> tree = {"pixel_values": np.zeros((4, 1176), np.float32)}
        >>> receiver = tensord.ProcessorCache(cache, ns)
        >>> [feature] = receiver.get_and_update_features([tensord.Feature("hash-1", tree)])
        >>> feature.data["pixel_values"].shape
        (4, 1176)
    """

    hash: Hash
    data: Any


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of lookups. `passed_through`: how many items were sent as trees, by reason:

    - "too_large": larger than object_bytes_max or the ring; "unsupported": a leaf of an unsupported type
    - "full": no room besides pinned entries; "pressure": the host is in emergency; "refused": the daemon refused it for
      another reason
    - "no_daemon"; "late": no answer in time, or an earlier put is still unanswered
    - "held": no room in the sender's holds; "invalidated": a receiver missed it recently
    - "gone": it was held, and cleared meanwhile
    - "mismatch": the tree stored under its hash is not one that this sender's processor makes
    """

    hits: int = 0
    total: int = 0
    passed_through: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Hits divided by lookups; 0 without lookups."""
        return self.hits / self.total if self.total else 0.0

    def since(self, before: Stats) -> Stats:
        """The counts since `before`."""
        passed = {reason: count - before.passed_through.get(reason, 0) for reason, count in self.passed_through.items()}
        return Stats(
            self.hits - before.hits,
            self.total - before.total,
            {reason: count for reason, count in passed.items() if count},
        )


class ProcessorCache:
    """The processor outputs of one namespace. Thread-safe. A process may be sender, receiver or both.

    Args:
        cache: the client to use; the caller closes it.
        namespace: namespace of the entries. `clear` drops all of its entries, so give the processor outputs one of
            their own.
        entries_max, bytes_max, seconds: limits of the leases that a sender holds for receivers, and for how many
            seconds. `bytes_max` defaults to a quarter of the ring.
        lend: whether a sender keeps entries that it referred to until the receiver has read them, instead of for
            `seconds`. The receiver can then read them even if the entry, the ring or the daemon is gone. Both sides run
            under one user, on one host, in one network namespace. Costs a thread and a socket, and pins up to
            `bytes_max` more.
        put_wait_s: seconds that a sender waits until its puts are visible, plus one second for each GiB.
        accepts: returns whether a stored tree (numpy arrays for leaves) is one that this sender's processor makes. A
            tree that it does not accept is a miss, and the item is sent as a tree. An accepted tree structure is not
            checked again.
        copy: the memory of a receiver's leaves. False: views of shared memory, read-only for numpy. Torch has no
            read-only tensors: an in-place operation on such a tensor ends the process with SIGSEGV. "on_write":
            copy-on-write views. True: copies.

    Raises:
        UsageError: an argument is out of its range.

    Example:
        >>> tree = {"pixel_values": np.zeros((4, 1176), np.float32)}
        >>> sender = tensord.ProcessorCache(cache, ns)
        >>> [sent] = sender.get_and_update([tree], ["hash-1"])      # a Reference in place of the tree
        >>> receiver = tensord.ProcessorCache(cache, ns)            # in another process
        >>> [feature] = receiver.get_and_update_features([tensord.Feature("hash-1", sent)])
        >>> type(sent).__name__, feature.data["pixel_values"].shape
        ('Reference', (4, 1176))
    """

    def __init__(
        self,
        cache: Client,
        namespace: Namespace,
        *,
        entries_max: int = 1024,
        bytes_max: int | None = None,
        seconds: float = 30.0,
        put_wait_s: float = 0.02,
        copy: Copy = False,
        lend: bool = False,
        accepts: Callable[[Any], bool] | None = None,
    ) -> None:
        if copy not in (False, True, "on_write"):
            raise UsageError(f'copy is {copy!r}; it must be False, True or "on_write"')
        self.namespace = namespace
        self._client = cache
        self._put_wait_s = check_seconds("put_wait_s", put_wait_s)
        self._copy = copy
        self._bytes_max = bytes_max
        self._holds = HeldLeases(entries_max, sys.maxsize if bytes_max is None else bytes_max, seconds)
        self._lender = Lender(seconds) if lend else None
        self._reader = Reader(cache)
        self._accepts = accepts
        self._accepted: set[Recipe] = set()
        self._lock = threading.Lock()
        self._late: list[tuple[Put, float]] = []
        self._distrusted: dict[bytes, float] = {}
        self._hits = self._total = 0
        self._passed: Counter[str] = Counter()
        self._reported = Stats()
        _everywhere.add(self)
        self.key: Callable[[Hash], bytes] = lru_cache(_KEYS_KEPT)(partial(_key_of, namespace))

    # ---- the sender

    def is_cached(self, hashes: Iterable[Hash]) -> list[bool]:
        """Returns for each item whether it is stored. Counts no use.

        Items with True are held for this thread until it calls `get_and_update` with them, or `release`, or for
        `seconds`. So they are not evicted while the other items are processed. An item that cannot be held is False.
        """
        return [self._is_held(self.key(hash)) for hash in hashes]

    def touch(self, hashes: Iterable[Hash]) -> int:
        """Counts a use of each stored item, and holds it as `is_cached` does. Returns how many are stored."""
        return sum(self._use(self.key(hash)) is not None for hash in hashes)

    def get_and_update(self, items: Sequence[Any], hashes: Sequence[Hash]) -> list[Any]:
        """Returns the data to send for each item: a Reference if it is stored, or its tree, passed through.

        All stored items are held before any is put. So storing one item evicts none of the others.

        Args:
            items: trees (see `Client.put`), or None for items that `is_cached` returned True for.
            hashes: one for each item.

        Raises:
            ReferenceLost: an item is None, and neither stored nor held; the error's `hashes` names all such items.
            UsageError: the numbers of hashes and items differ.
        """
        if len(items) != len(hashes):
            raise UsageError(f"{len(items)} items with {len(hashes)} hashes; pass one hash for each item")
        keys = [self.key(hash) for hash in hashes]
        found = {key: self._use(key) for key in dict.fromkeys(keys)}
        trees = {
            key: (hash, item)
            for hash, key, item in zip(hashes, keys, items, strict=True)
            if item is not None and found[key] is None
        }
        # The source of an item without a tree, even if another thread ends its hold meanwhile.
        leases = {key: self._holds.get(key) if lease is None else lease for key, lease in found.items()}
        lost = [
            hash
            for hash, key in zip(hashes, keys, strict=True)
            if found[key] is None and key not in trees and _tree_of(leases[key], copy=False) is None
        ]
        if lost:
            raise _lost(lost)
        reasons = self._store(trees)
        sent = [
            self._sent(
                key, trees[key][1] if key in trees else item, leases[key], found[key] is not None, reasons.get(key)
            )
            for key, item in zip(keys, items, strict=True)
        ]
        if self._lender is not None:
            # The loans keep the leases for as long as needed.
            for key in found:
                self._holds.recall(key)
        lost = [hash for hash, outcome in zip(hashes, sent, strict=True) if outcome is None]
        if lost:
            raise _lost(lost)
        return sent

    def held(self, hash: Hash) -> Any:
        """The tree that is held under `hash`, with read-only numpy views for leaves; None if none is held."""
        lease = self._holds.get(self.key(hash))
        payload = lease.tree if lease is not None else None
        return payload.get(_TREE) if isinstance(payload, dict) else None

    def release(self) -> None:
        """Ends the holds of `is_cached` and `touch` for this thread. Entries that were referred to stay
        for `seconds`.
        """
        self._holds.release()

    def invalidate(self, hashes: Iterable[Hash]) -> None:
        """Marks items that a receiver missed. For `seconds` this sender treats them as not stored, and sends their
        trees.

        From 64 such items at once, it treats all items as not stored: the receiver must be mapping another ring.
        """
        until = time.monotonic() + self._holds.seconds
        for hash in hashes:
            key = self.key(hash)
            self._holds.recall(key)
            with self._lock:
                self._distrusted.pop(key, None)
                self._distrusted[key] = until

    def pass_through(self, reason: str) -> None:
        """Counts an item that the caller sends as a tree without a lookup."""
        with self._lock:
            self._total += 1
            self._passed[reason] += 1

    # ---- the receiver

    def get_and_update_features(self, features: Iterable[Feature]) -> list[Feature]:
        """Returns the features with trees for data. Features whose data is a tree stay as they are.

        All references are pinned before any tree is made. Each tree pins its entry for as long as any leaf of it lives,
        unless the leaves are copies. Lenders are told that their loans were read.

        Raises:
            ReferenceLost: entries are gone; the error's `hashes` names all of them.
            UsageError: a reference's entry was not stored under the feature's hash.
        """
        asked = list(features)
        try:
            return self._filled(asked)
        finally:
            self._reader.done(feature.data for feature in asked if isinstance(feature.data, Reference))

    def _filled(self, asked: list[Feature]) -> list[Feature]:
        leases = [self._lease_of(feature) for feature in asked]
        lost = [
            feature.hash
            for feature, lease in zip(asked, leases, strict=True)
            if lease is None and (feature.data is None or isinstance(feature.data, Reference))
        ]
        with self._lock:
            self._total += len(asked)
            self._hits += sum(lease is not None for lease in leases)
        if lost:
            raise ReferenceLost(f"{lost} are not stored any more; let the sender send their trees", lost)
        return [
            feature if lease is None else replace(feature, data=self._tree(feature.hash, lease))
            for feature, lease in zip(asked, leases, strict=True)
        ]

    # ---- both

    def make_stats(self, delta: bool = False) -> Stats:
        """Returns the counts of `get_and_update` and `get_and_update_features` since the start, or since `clear`; with
        `delta` since the last call with `delta`.
        """
        with self._lock:
            stats = Stats(self._hits, self._total, dict(self._passed))
            if not delta:
                return stats
            reported, self._reported = self._reported, stats
            return stats.since(reported)

    def forget(self) -> None:
        """Drops all holds and resets the counts. Entries stay stored."""
        self._holds.clear()
        with self._lock:
            self._distrusted.clear()
            self._hits = self._total = 0
            self._passed.clear()
            self._reported = Stats()

    def clear(self) -> int:
        """Calls `forget`, and removes all entries of the namespace, from all clients. Returns how many there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the entries stay.
        """
        self.forget()
        return self._client.clear(self.namespace)

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries that this sender holds now."""
        return self._holds.held_bytes

    def lends(self, reference: Reference) -> bool:
        """Whether the loan of a reference belongs to this sender."""
        return self._lender is not None and self._lender.made(reference.loan)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the entries that this sender lends, and that receivers have not read yet."""
        return self._lender.lent_bytes if self._lender is not None else 0

    def close(self) -> None:
        """Ends all holds and loans. A sent Reference that was not read yet is lost if its entry is gone. Needed only
        with `lend`, at the end. Idempotent.
        """
        self._holds.clear()
        self._reader.close()
        if self._lender is not None:
            self._lender.close()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock. For the library."""
        self._lock = threading.Lock()

    # ---- internal

    def _is_held(self, key: bytes) -> bool:
        if self._is_distrusted(key):
            return False
        lease = self._client.hold(key)
        return lease is not None and self._fits(lease) and self._promise(key, lease)

    def _use(self, key: bytes) -> Lease | None:
        """Counts a use of a stored entry, and holds it."""
        if self._is_distrusted(key):
            return None
        lease = self._client.get(key)
        return lease if lease is not None and self._fits(lease) and self._promise(key, lease) else None

    def _fits(self, lease: Lease) -> bool:
        if self._accepts is None or lease._recipe in self._accepted:
            return True
        if not self._accepts(_tree_of(lease, copy=False)):
            return False
        if len(self._accepted) >= _KEYS_KEPT:
            self._accepted.clear()
        self._accepted.add(lease._recipe)
        return True

    def _promise(self, key: bytes, lease: Lease) -> bool:
        view = self._client.link.view
        if self._bytes_max is None and view is not None:
            self._holds.bytes_max = max(1, view.ring_bytes // _HELD_SHARE)
        return self._holds.promise(key, lease)

    def _is_distrusted(self, key: bytes) -> bool:
        distrusted = self._distrusted
        if not distrusted:
            return False
        now = time.monotonic()
        with self._lock:
            while distrusted and next(iter(distrusted.values())) <= now:
                del distrusted[next(iter(distrusted))]
            return key in distrusted or len(distrusted) >= _DISTRUSTED_ALL

    @property
    def owed_s(self) -> float:
        """For how many seconds the daemon has not answered a put that is not waited for any more; 0 if
        there is none.
        """
        self._late = [(put, began) for put, began in self._late if put.state == "sent"]
        return max((time.monotonic() - began for _, began in self._late), default=0.0)

    def _store(self, trees: Mapping[bytes, tuple[Hash, Any]]) -> dict[bytes, str]:
        """Puts these trees, and waits until they are visible. Returns by key why a tree was not stored."""
        reasons: dict[bytes, str] = {}
        puts: list[Put] = []
        owing = bool(self.owed_s)
        # One time limit for all of them, so that a daemon without room is waited for once.
        wait_s = self._put_wait_s
        began = time.monotonic()
        for key, (hash, tree) in trees.items():
            if self._is_distrusted(key) and self._client.contains(key):
                reasons[key] = "invalidated"
                continue
            if owing:
                reasons[key] = "late"
                continue
            found = self._client.hold(key) if self._accepts is not None else None
            if found is not None and not self._fits(found):
                reasons[key] = "mismatch"
                continue
            stored = {_HASH: np.frombuffer(_hash_bytes(hash), np.uint8), _TREE: tree}
            try:
                wait_s += item_bytes(tree, nodes_max=NODES_MAX) / _SLOW_BYTES_PER_S
                put = self._client.put(key, stored, timeout_s=max(0.0, began + wait_s - time.monotonic()))
                puts.append(put)
                owing = isinstance(put.error, TimedOut | LimitReached)
            except Exception as error:
                # An exception of a leaf's own library (a tensor without memory, a lost device) must not fail the
                # request.
                reasons[key] = _reason(error)
        # The wait begins here, unless it began with an earlier unanswered put. Copying until here does not count:
        # sending the tree would have cost a copy too.
        deadline = (began if owing else time.monotonic()) + wait_s
        for put in puts:
            try:
                put.wait(max(0.0, deadline - time.monotonic()))
            except TimedOut:
                self._late.append((put, began))
            if put.state not in ("stored", "existed"):
                reasons[put.key] = _reason(put.error)
            elif not self._is_held(put.key):
                reasons[put.key] = "invalidated" if self._is_distrusted(put.key) else "held"
        return reasons

    def _sent(self, key: bytes, item: Any, lease: Lease | None, was_there: bool, reason: str | None) -> Any:
        """The data to send for one item, and its count. None without a count if neither the item nor its lease has a
        tree.
        """
        if item is None and not was_there:
            # Evicted on request or cleared since `is_cached`: the held lease is the only source left.
            reason = "gone"
        reference = self._lent(key) if reason is None else None
        if reason is None and reference is None:
            reason = "gone" if item is None else "held"
        if reason is not None:
            item = _tree_of(lease, copy=True) if item is None else item
            if item is None:
                return None
        with self._lock:
            self._total += 1
            self._hits += was_there
            if reason is not None:
                self._passed[reason] += 1
        return item if reference is None else reference

    def _lent(self, key: bytes) -> Reference | None:
        """A Reference to an entry that is kept for receivers from now on; None if it cannot be kept."""
        lease = self._holds.get(key)
        if lease is None or not self._holds.lend(key):
            return None
        if self._lender is None:
            return Reference(key)
        handle = lease.handle()
        loan = self._lender.lend(lease, self._holds.bytes_max) if handle is not None else None
        return Reference(key, handle, loan) if handle is not None and loan is not None else None

    def _lease_of(self, feature: Feature) -> Lease | None:
        """The lease of the entry that a feature refers to. None if the entry is gone, or the feature has a tree."""
        if feature.data is None:
            return self._client.get(self.key(feature.hash))
        return self._reader.lease(feature.data) if isinstance(feature.data, Reference) else None

    def _tree(self, hash: Hash, lease: Lease) -> Any:
        payload = _payload(lease, copy=self._copy)
        named = payload.get(_HASH)
        if (
            payload.keys() != {_HASH, _TREE}
            or not isinstance(named, np.ndarray)
            or named.tobytes() != _hash_bytes(hash)
        ):
            raise UsageError(
                f"the entry referred to as {hash!r} was not stored under that hash; send this item's own reference"
            )
        return payload[_TREE]


def _key_of(namespace: Namespace, hash: Hash) -> bytes:
    return namespace.key(_KIND, "", _hash_bytes(hash))


def _hash_bytes(hash: Hash) -> bytes:
    return hash.encode("utf-8", "surrogatepass") if isinstance(hash, str) else hash


def _payload(lease: Lease, copy: Copy) -> dict[str, Any]:
    """The payload of a lease's entry, its leaves as they were put; empty if it is not in this module's format."""
    if isinstance(lease, ArrayLease):
        return {}
    root = private_view(lease._root) if copy == "on_write" else lease._root
    payload = lease._recipe.value(root, copy=copy is True)
    if not isinstance(payload, dict):
        return {}
    return _owned(payload) if copy is True else payload


def _tree_of(lease: Lease | None, copy: bool) -> Any:
    """The tree of a lease's entry; None if there is none."""
    return None if lease is None else _payload(lease, copy).get(_TREE)


def _lost(hashes: list[Hash]) -> ReferenceLost:
    return ReferenceLost(
        f"no tree was given for {hashes}, which are neither stored nor held; call is_cached, and process the items "
        "that are False",
        hashes,
    )


def _owned(node: Any) -> Any:
    """The same tree with arrays that own their memory."""
    if isinstance(node, dict):
        return {key: _owned(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(_owned, node))
    return node.copy() if isinstance(node, np.ndarray) else node


def _reason(error: BaseException | None) -> str:
    """The reason for passing an item through, from the error of its put."""
    if error is None:
        return "late"
    for kind, reason in _REFUSALS:
        if isinstance(error, kind):
            return reason
    return "refused" if isinstance(error, TensordError) else "unsupported"


_everywhere: Final[WeakSet[ProcessorCache]] = WeakSet()


def _in_child() -> None:
    for cache in list(_everywhere):
        cache.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
