"""What processors made of pictures, sound and video, for all frontends and engines of a host: by hash, as nested trees.

A frontend is the sender: it asks which items are there, processes the others, and sends References instead of trees.
An engine is the receiver: it turns References into trees, which are views of shared memory. There may be any number of
both.

    sender     there = cache.is_cached(hashes)                       # what it answers True for is held
               trees = [None if known else process(item) for item, known in zip(items, there)]
               sent = cache.get_and_update(trees, hashes)            # a Reference, or the tree itself
    receiver   features = cache.get_and_update_features([Feature(hash, data) for hash, data in zip(hashes, received)])

Owns: what becomes of each item, and its count. Does not own what is stored (the daemon's), nor how long a sender keeps
what it named (holds.py).

Neither side mirrors what the other has. A sender names only what it holds pinned, and holds it long enough for the
receiver to read it; a receiver that does not find it says so once for the whole request, by `ReferenceLost`, upon which
the sender calls `invalidate` and sends trees.

That a put is visible is known by the daemon's answer, so a sender waits for it: for milliseconds, since the tree that
it would send instead would have to be copied, too. Where the answer is late, the tree is sent and the put goes on;
until it is answered nothing else is put, so that a daemon which does not answer costs one such wait, and not one each.
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

# What is stored: the tree, and the hash that it is the tree of, since a reference comes from another process.
_HASH: Final = "hash"
_TREE: Final = "tree"
_KIND: Final = "processor"
# What a daemon copies in a second on a loaded machine, at least: by so much its answer comes later for a large tree.
_SLOW_BYTES_PER_S: Final = 1 << 30
_HELD_SHARE: Final = 4
_KEYS_KEPT: Final = 4096
# So many items that a receiver did not find, all at once: it does not see what this sender sees, and gets trees.
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

    `data` is a Reference or a tree, or None for "what is stored under this hash"; returned, always the tree.

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
    """What was looked up. `passed_through`: how many items went as their trees, by why:

    - "too_large": over object_bytes_max, or than the ring is; "unsupported": what no tree can hold
    - "full": no room that is not pinned; "pressure": the host is in emergency; "refused": the daemon said no otherwise
    - "no_daemon"; "late": it did not answer in time, or still owes the answer to a former put
    - "held": no room among what this sender holds; "invalidated": a receiver had not found it, recently
    - "gone": it was held, and cleared meanwhile
    - "mismatch": what is stored under its hash is not what this sender's processor makes
    """

    hits: int = 0
    total: int = 0
    passed_through: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Hits of all; 0 where nothing was looked up."""
        return self.hits / self.total if self.total else 0.0

    def since(self, before: Stats) -> Stats:
        """What was counted after `before`."""
        passed = {reason: count - before.passed_through.get(reason, 0) for reason, count in self.passed_through.items()}
        return Stats(
            self.hits - before.hits,
            self.total - before.total,
            {reason: count for reason, count in passed.items() if count},
        )


class ProcessorCache:
    """The processor outputs of one namespace; see the module. Safe to use from several threads.

    Args:
        cache: stays the caller's.
        namespace: `clear` drops all that is stored under it: best one that has nothing else.
        entries_max, bytes_max, seconds: what a sender holds for receivers, and for how long; without `bytes_max` a
            quarter of the ring.
        lend: whether a sender keeps what it referred to until the receiver has read it, instead of for `seconds`. The
            receiver reads it whatever becomes of the entry, the ring or the daemon meanwhile. Both sides run under one
            user, on one host, in one network namespace. It takes a thread and a socket, and pins `bytes_max` more.
        put_wait_s: for how long a sender waits until what it put is visible; one more second for each GiB.
        accepts: whether a sender takes a stored tree, with numpy arrays for leaves, for what its own processor makes.
            What it does not take is a miss, and goes whole. What it has taken once it takes again.
        copy: how a receiver's leaves come. False: views of shared memory, numpy's read-only. Torch has no read-only
            tensors: an in-place operation on one of those ends the process with SIGSEGV. "on_write": views of pages
            that become this process's own where it writes on them. True: memory of this process's own.

    Raises:
        UsageError: an argument out of its range.

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
            raise UsageError(f'copy is {copy!r}; give False, True or "on_write"')
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
        self._told = Stats()
        _everywhere.add(self)
        self.key: Callable[[Hash], bytes] = lru_cache(_KEYS_KEPT)(partial(_key_of, namespace))

    # ---- the sender

    def is_cached(self, hashes: Iterable[Hash]) -> list[bool]:
        """Which items are there. Not counted as a use of them.

        What it answers True for is held until this thread has called `get_and_update` with it, or `release`, or for
        `seconds`: it cannot go while the other items are processed. Where it can not be held, the answer is False.
        """
        return [self._is_held(self.key(hash)) for hash in hashes]

    def touch(self, hashes: Iterable[Hash]) -> int:
        """Counts as a use of each item that is there, and holds it as `is_cached` does. Returns how many are there."""
        return sum(self._use(self.key(hash)) is not None for hash in hashes)

    def get_and_update(self, items: Sequence[Any], hashes: Sequence[Hash]) -> list[Any]:
        """What to send for each item: a Reference where it is stored, or its tree, passed through.

        All that are there are held before anything is put, so that storing one item evicts none of the others.

        Args:
            items: trees (see `Client.put`), or None for what `is_cached` said is there.
            hashes: one for each.

        Raises:
            ReferenceLost: None was given for what is neither stored nor held; `hashes` of it names all of those.
            UsageError: not as many hashes as items.
        """
        if len(items) != len(hashes):
            raise UsageError(f"{len(items)} items with {len(hashes)} hashes; give one for each")
        keys = [self.key(hash) for hash in hashes]
        there = {key: self._use(key) for key in dict.fromkeys(keys)}
        trees = {
            key: (hash, item)
            for hash, key, item in zip(hashes, keys, items, strict=True)
            if item is not None and there[key] is None
        }
        # What an item without a tree is made of, whatever another thread ends meanwhile.
        leases = {key: self._holds.get(key) if lease is None else lease for key, lease in there.items()}
        lost = [
            hash
            for hash, key in zip(hashes, keys, strict=True)
            if there[key] is None and key not in trees and _tree_of(leases[key], copy=False) is None
        ]
        if lost:
            raise _lost(lost)
        reasons = self._store(trees)
        sent = [
            self._sent(
                key, trees[key][1] if key in trees else item, leases[key], there[key] is not None, reasons.get(key)
            )
            for key, item in zip(keys, items, strict=True)
        ]
        if self._lender is not None:
            # Their loans keep them for as long as it is needed.
            for key in there:
                self._holds.recall(key)
        lost = [hash for hash, outcome in zip(hashes, sent, strict=True) if outcome is None]
        if lost:
            raise _lost(lost)
        return sent

    def held(self, hash: Hash) -> Any:
        """The tree that is held under `hash`, with read-only numpy views for leaves; None if none is."""
        lease = self._holds.get(self.key(hash))
        payload = lease.tree if lease is not None else None
        return payload.get(_TREE) if isinstance(payload, dict) else None

    def release(self) -> None:
        """Holds no more what `is_cached` and `touch` held for this thread. What was referred to stays for its time."""
        self._holds.release()

    def invalidate(self, hashes: Iterable[Hash]) -> None:
        """A receiver did not find these: for `seconds` they are not there for this sender, which sends their trees.
        Where so many are not found that the receiver must be looking at another ring, nothing is there.
        """
        until = time.monotonic() + self._holds.seconds
        for hash in hashes:
            key = self.key(hash)
            self._holds.recall(key)
            with self._lock:
                self._distrusted.pop(key, None)
                self._distrusted[key] = until

    def pass_through(self, reason: str) -> None:
        """Counts an item that the caller sends as it is, without having asked."""
        with self._lock:
            self._total += 1
            self._passed[reason] += 1

    # ---- the receiver

    def get_and_update_features(self, features: Iterable[Feature]) -> list[Feature]:
        """The features with trees for data. A tree that was passed through stays as it is.

        All that are referred to are pinned before any tree is made. Each tree pins its entry for as long as any leaf of
        it lives, unless leaves are copies. Whoever lends what is referred to is told that it is read.

        Raises:
            ReferenceLost: some are not there; `hashes` of it names all of those.
            UsageError: a reference to what was not stored under its hash.
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
            raise ReferenceLost(f"{lost} are not stored any more; have their trees sent", lost)
        return [
            feature if lease is None else replace(feature, data=self._tree(feature.hash, lease))
            for feature, lease in zip(asked, leases, strict=True)
        ]

    # ---- both

    def make_stats(self, delta: bool = False) -> Stats:
        """What was looked up by `get_and_update` and `get_and_update_features` since the beginning, or `clear`; with
        `delta` since the last call with it.
        """
        with self._lock:
            stats = Stats(self._hits, self._total, dict(self._passed))
            if not delta:
                return stats
            told, self._told = self._told, stats
            return stats.since(told)

    def forget(self) -> None:
        """Holds nothing, and counts from 0. What is stored stays, for all who know its hash."""
        self._holds.clear()
        with self._lock:
            self._distrusted.clear()
            self._hits = self._total = 0
            self._passed.clear()
            self._told = Stats()

    def clear(self) -> int:
        """`forget`, and removes all entries of the namespace, whoever stored them. Returns how many there were.

        Raises:
            DaemonUnavailable, TimedOut: why they were not removed.
        """
        self.forget()
        return self._client.clear(self.namespace)

    @property
    def held_bytes(self) -> int:
        """Bytes of what this sender holds now."""
        return self._holds.held_bytes

    def lends(self, reference: Reference) -> bool:
        """Whether the loan of a reference is this sender's."""
        return self._lender is not None and self._lender.made(reference.loan)

    @property
    def lent_bytes(self) -> int:
        """Bytes of what this sender lends, and receivers have not read yet."""
        return self._lender.lent_bytes if self._lender is not None else 0

    def close(self) -> None:
        """Holds and lends nothing any more; what was sent and not read yet is lost where its entry is gone. Only where
        `lend` is on it is needed, and then at the end. Idempotent."""
        self._holds.clear()
        self._reader.close()
        if self._lender is not None:
            self._lender.close()

    def after_fork_in_child(self) -> None:
        """Its lock may be taken by a thread that is not here. For the library."""
        self._lock = threading.Lock()

    # ---- inside

    def _is_held(self, key: bytes) -> bool:
        if self._is_distrusted(key):
            return False
        lease = self._client.hold(key)
        return lease is not None and self._fits(lease) and self._promise(key, lease)

    def _use(self, key: bytes) -> Lease | None:
        """Counts as a use of what is there, and holds it."""
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
        """For how many seconds the daemon has owed the answer to a put that was not waited for; 0 if it owes none."""
        self._late = [(put, began) for put, began in self._late if put.state == "sent"]
        return max((time.monotonic() - began for _, began in self._late), default=0.0)

    def _store(self, trees: Mapping[bytes, tuple[Hash, Any]]) -> dict[bytes, str]:
        """Puts these, and waits until they are visible. Returns why it came to nothing, by key."""
        reasons: dict[bytes, str] = {}
        puts: list[Put] = []
        owing = bool(self.owed_s)
        # One for all of these, so that a daemon that makes no room is waited for once.
        wait_s = self._put_wait_s
        began = time.monotonic()
        for key, (hash, tree) in trees.items():
            if self._is_distrusted(key) and self._client.contains(key):
                reasons[key] = "invalidated"
                continue
            if owing:
                reasons[key] = "late"
                continue
            there = self._client.hold(key) if self._accepts is not None else None
            if there is not None and not self._fits(there):
                reasons[key] = "mismatch"
                continue
            stored = {_HASH: np.frombuffer(_hash_bytes(hash), np.uint8), _TREE: tree}
            try:
                wait_s += item_bytes(tree, nodes_max=NODES_MAX) / _SLOW_BYTES_PER_S
                put = self._client.put(key, stored, timeout_s=max(0.0, began + wait_s - time.monotonic()))
                puts.append(put)
                owing = isinstance(put.error, TimedOut | LimitReached)
            except Exception as error:
                # What a leaf's own library raises (a tensor without memory, a lost device) is no error of the request.
                reasons[key] = _reason(error)
        # From here on it is waiting, unless it did so already; until here it was copying, which the tree's own way
        # would have cost as well.
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
        """The outcome for one item, and its count; None, and no count, where neither it nor its lease has a tree."""
        if item is None and not was_there:
            # Evicted by order, or cleared, after is_cached: what is held is all that is left of it.
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
        """What refers to an entry that is kept for receivers from now on; None where it is not kept."""
        lease = self._holds.get(key)
        if lease is None or not self._holds.lend(key):
            return None
        if self._lender is None:
            return Reference(key)
        handle = lease.handle()
        loan = self._lender.lend(lease, self._holds.bytes_max) if handle is not None else None
        return Reference(key, handle, loan) if handle is not None and loan is not None else None

    def _lease_of(self, feature: Feature) -> Lease | None:
        """The lease of what a feature refers to; None if it is gone, or nothing is referred to."""
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
            raise UsageError(f"what is referred to as {hash!r} was not stored under that hash; send its own reference")
        return payload[_TREE]


def _key_of(namespace: Namespace, hash: Hash) -> bytes:
    return namespace.key(_KIND, "", _hash_bytes(hash))


def _hash_bytes(hash: Hash) -> bytes:
    return hash.encode("utf-8", "surrogatepass") if isinstance(hash, str) else hash


def _payload(lease: Lease, copy: Copy) -> dict[str, Any]:
    """What a lease's entry has, its leaves as they were put; nothing where it is not of this module's making."""
    if isinstance(lease, ArrayLease):
        return {}
    root = private_view(lease._root) if copy == "on_write" else lease._root
    payload = lease._recipe.value(root, copy=copy is True)
    if not isinstance(payload, dict):
        return {}
    return _owned(payload) if copy is True else payload


def _tree_of(lease: Lease | None, copy: bool) -> Any:
    """The tree that a lease's entry has; None where there is none."""
    return None if lease is None else _payload(lease, copy).get(_TREE)


def _lost(hashes: list[Hash]) -> ReferenceLost:
    return ReferenceLost(
        f"no tree was given for {hashes}, which are neither stored nor held: ask is_cached, and process what it says "
        "False of",
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
    """Why an item was passed through, of what its put ended in."""
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
