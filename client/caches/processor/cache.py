"""The processor cache: outputs of image, sound and video processors, shared by all frontends and engines of a host.

A frontend is the sender: it asks which items are stored, processes the others, and sends References instead of trees.
An engine is the receiver: it turns References into trees, which are views of shared memory. There may be several of
both.

    sender     there = cache.is_cached(hashes)                       # items with True are held
               trees = [None if known else process(item) for item, known in zip(items, there)]
               sent = cache.get_and_update(trees, hashes)            # a Reference, or the tree itself
    receiver   features = cache.get_and_update_features([Feature(hash, data) for hash, data in zip(hashes, received)])

Owns: the outcome of each item. Does not own: the entries (the daemon's), their format (payload.py), which of
them a sender may refer to and its puts (sender.py), and for how long it keeps them (loans.py).
Invariants: neither side mirrors the state of the other. A sender refers only to entries that it keeps pinned until the
receiver has read them. A receiver that misses an entry raises one `ReferenceLost` for the whole request; then the
sender calls `invalidate` and sends trees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final

from ....errors import ReferenceLost, UsageError, shown
from ...arguments.checks import check_iterable, check_seconds
from ...arguments.namespace import Namespace, check_namespace
from ...core.client import Client, check_client
from ...reading.lease import Lease, Recipes, lease_of_copy
from ..measures import Counts
from .loans import Loans, Reference, done, fetch
from .payload import Copy, Hash, check_hash, checked_tree, item_key, stored_tree
from .sender import Sender

_KEYS_KEPT: Final = 4096


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


class ProcessorCache:
    """The processor outputs of one namespace. Thread-safe. A process may be sender, receiver or both.

    Args:
        cache: the client to use; the caller closes it.
        namespace: namespace of the entries. `clear` drops all of its entries, so give the processor outputs one of
            their own.
        entries_max, bytes_max: limits of the entries that a sender holds for its threads, and again of those that it
            has referred to and that no receiver has read yet. `bytes_max` defaults to a quarter of the ring.
        seconds: for how long an item of `is_cached` is held. An entry that was referred to is kept until the receiver
            has read it, even if the entry, the ring or the daemon is gone; after `seconds` it may make room for another
            one. This takes a thread and a socket of the sender's process. A receiver of another user, or in another
            network namespace, reads what is in the ring.
        put_wait_s: seconds that a sender waits until its puts are visible, plus one second for each GiB.
        accepts: returns whether a stored tree is one that this sender's processor makes. A tree that it does not accept
            is a miss, and the item is sent as a tree. An accepted tree structure is not checked again.
        copy: the memory of a receiver's leaves. False: views of shared memory, read-only for numpy. Torch has no
            read-only tensors: an in-place operation on such a tensor ends the process with SIGSEGV. "on_write":
            copy-on-write views. True: copies.

    Raises:
        UsageError: `cache` is no Client, or an argument is out of its range.

    Example:
        >>> tree = {"pixel_values": np.zeros((4, 1176), np.float32)}
        >>> sender = tensord.ProcessorCache(cache, ns, put_wait_s=10)
        >>> [sent] = sender.get_and_update([tree], ["hash-1"])  # a Reference in place of the tree
        >>> receiver = tensord.ProcessorCache(cache, ns)  # in another process
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
        accepts: Callable[[Any], bool] | None = None,
    ) -> None:
        given: object = copy
        if not isinstance(given, bool | str) or given not in (False, True, "on_write"):
            raise UsageError(f'copy is {shown(copy)}; it must be False, True or "on_write"')
        self.namespace = check_namespace(namespace)
        self._client = check_client(cache, "cache")
        self._copy: Copy = copy
        put_wait_s = check_seconds("put_wait_s", put_wait_s)
        self._loans = Loans(entries_max, sys.maxsize if bytes_max is None else bytes_max, seconds)
        self._sender = Sender(cache, self._loans, put_wait_s, accepts)
        self._recipes = Recipes()
        self._counts = Counts()
        self.key: Callable[[Hash], bytes] = lru_cache(_KEYS_KEPT)(partial(item_key, namespace))

    # ---- the sender

    def is_cached(self, hashes: Iterable[Hash]) -> list[bool]:
        """Returns for each item whether it is stored. Counts no use.

        Items with True are held for this thread until it calls `get_and_update` with them, or `release`, or for
        `seconds`. So they are not evicted while the other items are processed. An item that cannot be held is False.
        """
        return [self._sender.hold(key) is not None for _, key in self._keys(hashes)]

    def touch(self, hashes: Iterable[Hash]) -> int:
        """Counts a use of each stored item, and holds it as `is_cached` does. Returns how many are stored."""
        return sum(self._sender.hold(key, counts=True) is not None for _, key in self._keys(hashes))

    def get_and_update(self, items: Sequence[Any], hashes: Sequence[Hash]) -> list[Any]:
        """Returns the data to send for each item: a Reference if it is stored, or its tree, passed through.

        All stored items are held before any is put. So storing one item evicts none of the others.

        Args:
            items: trees (see `Client.put`), or None for items that `is_cached` returned True for.
            hashes: one for each item.

        Raises:
            ReferenceLost: an item is None, and neither stored nor held; the error's `hashes` names all such items. The
                other items were stored.
            UsageError: the numbers of hashes and items differ, or a hash is neither text nor bytes.
        """
        items = list(check_iterable("items", items, "trees, or None for those that are stored"))
        named = self._keys(hashes)
        if len(items) != len(named):
            raise UsageError(f"{len(items)} items with {len(named)} hashes; pass one hash for each item")
        found = {key: self._sender.hold(key, counts=True) for key in dict.fromkeys(key for _, key in named)}
        trees = {
            key: (hash, item)
            for (hash, key), item in zip(named, items, strict=True)
            if item is not None and found[key] is None
        }
        reasons = self._sender.store(trees)
        sent = []
        for (_, key), item in zip(named, items, strict=True):
            _, tree = trees.get(key, ("", item))
            sent.append(self._sent(key, tree, found[key], reasons.get(key)))
        # The loans keep the leases for as long as needed.
        self._loans.release(found)
        lost = [hash for (hash, _), outcome in zip(named, sent, strict=True) if outcome is None]
        if lost:
            raise ReferenceLost(
                f"no tree was given for {lost}, which are neither stored nor held; call is_cached, and process the "
                "items that are False",
                lost,
            )
        return sent

    def held(self, hash: Hash) -> Any:
        """The tree that is held for this thread under `hash`, its leaves over the ring's memory; None if none is."""
        return stored_tree(self._loans.promised(self.key(check_hash(hash))))

    def release(self) -> None:
        """Ends the holds of `is_cached` and `touch` for this thread. Entries that were referred to stay."""
        self._loans.release()

    def invalidate(self, hashes: Iterable[Hash]) -> None:
        """Marks items that a receiver missed. For `seconds` this sender treats them as not stored."""
        self._sender.distrust(key for _, key in self._keys(hashes))

    def pass_through(self, reason: str) -> None:
        """Counts an item that the caller sends as a tree without a lookup."""
        self._counts.add({"total": 1, reason: 1})

    # ---- the receiver

    def get_and_update_features(self, features: Iterable[Feature]) -> list[Feature]:
        """Returns the features with trees for data. Features whose data is a tree stay as they are.

        All references are pinned before any tree is made. Each tree pins its entry for as long as any leaf of it lives,
        unless the leaves are copies. The senders are told that the references were read.

        Raises:
            ReferenceLost: entries are gone; the error's `hashes` names all of them.
            UsageError: a reference's entry was not stored under the feature's hash.
        """
        asked = list(check_iterable("features", features, "Features"))
        for each in asked:
            if not isinstance(each, Feature):
                raise UsageError(f"features has {shown(each)}; it must be tensord.Features")
            check_hash(each.hash)
        try:
            return self._filled(asked)
        finally:
            done(feature.data.loan for feature in asked if isinstance(feature.data, Reference))

    def _filled(self, asked: list[Feature]) -> list[Feature]:
        leased = [(feature, self._lease_of(feature)) for feature in asked]
        self._counts.add({"total": len(leased), "hits": sum(lease is not None for _, lease in leased)})
        lost = [
            feature.hash
            for feature, lease in leased
            if lease is None and (feature.data is None or isinstance(feature.data, Reference))
        ]
        if lost:
            raise ReferenceLost(f"{lost} are not stored any more; let the sender send their trees", lost)
        return [
            feature if lease is None else Feature(feature.hash, checked_tree(feature.hash, lease, self._copy))
            for feature, lease in leased
        ]

    # ---- both

    def make_stats(self, delta: bool = False) -> Stats:
        """The counts of `get_and_update` and `get_and_update_features` since the start or `clear`; with `delta` since
        the last call with `delta`."""
        counts = self._counts.since_last() if delta else self._counts.since_reset()
        return Stats(counts.pop("hits", 0), counts.pop("total", 0), counts)

    def forget(self) -> None:
        """Ends all holds and resets the counts. Entries stay stored."""
        self._sender.forget()
        self._counts.reset()

    def clear(self) -> int:
        """Calls `forget`, and removes all entries of the namespace, from all clients. Returns how many there were.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not answer; the entries stay.
        """
        self.forget()
        return self._client.clear(self.namespace)

    @property
    def owed_s(self) -> float:
        """For how many seconds the daemon has not answered a put that is not waited for any more; 0 without one."""
        return self._sender.owed_s

    @property
    def held_bytes(self) -> int:
        """Bytes of the entries that this sender holds for its threads."""
        return self._loans.promised_bytes

    def lends(self, reference: Reference) -> bool:
        """Whether the loan of a reference belongs to this sender."""
        if not isinstance(reference, Reference):
            raise UsageError(f"reference is {shown(reference)}; it must be a tensord.Reference")
        return self._loans.has_made(reference.loan)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the entries that this sender has referred to, and that receivers have not read yet."""
        return self._loans.lent_bytes

    def close(self) -> None:
        """Ends all holds and loans. A sent Reference that was not read yet is lost if its entry is gone. Idempotent."""
        self._loans.close()

    # ---- internal

    def _keys(self, hashes: Iterable[Hash]) -> list[tuple[Hash, bytes]]:
        return [(hash, self.key(hash)) for hash in map(check_hash, check_iterable("hashes", hashes, "texts or bytes"))]

    def _sent(self, key: bytes, item: Any, found: Lease | None, reason: str | None) -> Any:
        """The data to send for one item, and its count. None without a count if neither the item nor its lease has a
        tree.

        Args:
            found: the entry's lease, if it is stored.
            reason: why the item was not stored, if it was to be.
        """
        # Without both it was evicted on request or cleared since `is_cached`, and is not referred to.
        data = self._lent(key) if reason is None and (item is not None or found is not None) else None
        if data is None and item is not None:
            data, reason = item, reason or "held"
        elif data is None:
            data, reason = stored_tree(self._loans.promised(key) if found is None else found, copy=True), "gone"
            if data is None:
                return None
        self._counts.add({"total": 1, "hits": found is not None} | ({} if reason is None else {reason: 1}))
        return data

    def _lent(self, key: bytes) -> Reference | None:
        """A Reference to an entry that is kept for receivers from now on; None if it cannot be kept."""
        lease = self._loans.promised(key)
        handle = lease.handle() if lease is not None else None
        loan = self._loans.lend(lease) if lease is not None and handle is not None else None
        return Reference(key, handle, loan) if handle is not None and loan is not None else None

    def _lease_of(self, feature: Feature) -> Lease | None:
        """The lease of the entry that a feature refers to. None if the entry is gone, or the feature has a tree.

        A reference with a handle is read from exactly the span that the sender saw, or from a copy of it:

            1. by key, in the index: the entry is pinned and read in place
            2. by handle, in the same ring: a checked copy. The entry was cleared or replaced since
            3. by loan, from the lender's pin: a copy over a socket. Sender and receiver map different rings
        """
        if feature.data is None:
            return self._client.get(self.key(feature.hash))
        if not isinstance(feature.data, Reference):
            return None
        key, handle, loan = feature.data
        found, view = self._client.get(key), self._client.link.view
        if not handle or (found is not None and found.handle() == handle):
            return found
        found = view.ring.copied(handle) if view is not None else None
        if found is None and loan and (span := fetch(loan)) is not None:
            found = lease_of_copy(span, handle, self._recipes)
        return found
