"""Sequences whose arrays stay on a device: the newest few of one PrefixCache, matched in this process without a copy.

Owns: which sequences stay, in the order in which they were put, and the search among them. Does not own the tensors,
nor when an order takes them (the DeviceCache does), nor what the host tier makes of a sequence (prefix_put).

Each is one entry of the DeviceCache, and leaves it, by whoever's wish, as blocks in the host tier, where every process
matches it. Above `n_on_device` the oldest leave: one that a match holds when nobody holds it any more, one that the
host tier does not take not at all, until the next put or `evict`.

Invariants: what stands in the list may have left the device, and is then no match. Nothing that the DeviceCache calls
refers to it: a cache that nobody holds ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from ...errors import Refusal, TensordError, TimedOut
from ...shm.prefix import Media, Tokens
from ..core.puts import PutState
from .keys import Keyed
from .layers import Layers
from .match import Held
from .put import PrefixPut, PrefixSequence, store
from .resident import HeldOnDevice, Resident, layers_from, longest, resident_of, tree_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.namespace import Namespace
    from ..device.cache import DeviceCache
    from ..device.entries import Registration

__all__ = ["DevicePut", "DeviceSequences"]


class DevicePut(PrefixPut):
    """What became of a put whose sequence stays on the device. `state` is

    - "sent": it is this process's to match; the daemon has not answered, or there is none yet.
    - "stored": the daemon counts it, and says when it is to go.
    - "refused", "lost": it is not here, and `error` says why.

    Of one that was offloaded before the daemon knew of it, what became of that.
    """

    __slots__ = ("_client", "_registration", "_resident")

    def __init__(self, blocks: int, client: Client, resident: Resident, registration: Registration) -> None:
        super().__init__(blocks, len(resident.sequence.layers.snapshots))
        self._client = client
        self._resident = resident
        self._registration = registration

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until it is known what became of it; without a daemon not at all.

        Raises:
            TimedOut: it is not known after `timeout_s`; the sequence stays.
        """
        if self._client.connected:
            self._registration.wait(timeout_s)
        return self

    def _outcome(self) -> tuple[PutState, TensordError | None]:
        state = self._registration.state
        if state == "registered":
            return "stored", None
        if state == "lost" and self._resident.copy is not None:
            return self._resident.copy.state, self._resident.copy.error
        return state, self._registration.error


class DeviceSequences:
    """The sequences of one PrefixCache on one device. Safe to use from several threads; a fork's child has none.

    Args:
        cache: holds them.
        n_on_device: so many stay; the oldest above it go to the host tier.
    """

    def __init__(self, cache: DeviceCache, namespace: Namespace, block_tokens: int, n_on_device: int) -> None:
        self._cache = cache
        self._namespace = namespace
        self._n_on_device = n_on_device
        self._to_host = _ToHost(cache.client, namespace, block_tokens)
        self._lock = threading.Lock()
        self._residents: OrderedDict[bytes, Resident] = OrderedDict()
        self._gone = 0
        _all.add(self)

    def holds(self, layers: Layers) -> bool:
        """Whether some of the arrays lie on the device.

        Raises:
            UsageError: one lies on another.
        """
        return self._cache.device.size_of(tree_of(layers, None)) > 0

    def put(self, sequence: PrefixSequence) -> PrefixPut:
        """Keeps a sequence, without copying its arrays, which must not be written any more. One with the same tokens,
        media and layout is replaced, and the new one has its place in the order."""
        chain = self._to_host.chain(sequence)
        key = self._namespace.key("prefix on device", "text", chain[-1].key)
        resident = resident_of(sequence)
        with self._lock:
            self._forget_gone()
        registration = self._cache.put(
            key,
            tree_of(sequence.layers, resident),
            tokens=len(sequence.tokens),
            agent=sequence.agent,
            to_host=self._to_host,
        )
        if registration.state not in ("refused", "lost"):
            with self._lock:
                self._residents[key] = resident
                oldest = self._over()
            if oldest:
                self._cache.offload(*oldest)
        return DevicePut(len(chain), self._cache.client, resident, registration)

    def match(self, query: Tokens, media: Sequence[Media]) -> tuple[int, Held] | None:
        """The longest prefix of a query that a sequence here has, and that its layers can rewind to: how many tokens,
        and what holds them; of several equally long ones the oldest. None where there is none."""
        with self._lock:
            self._forget_gone()
            residents = list(self._residents.items())
        found = [
            (offset, key)
            for key, resident in residents
            if (offset := longest(resident.sequence, resident.rewinds, query, media))
        ]
        for _, key in sorted(found, key=lambda one: -one[0]):
            lease = self._cache.get(key) if self._cache.contains(key) else None
            if lease is None or lease.tier != "device":
                continue
            # Where a put anew was refused meanwhile, what was there before it stands under the key.
            resident = lease.tree["resident"]
            offset = longest(resident.sequence, resident.rewinds, query, media)
            if offset:
                return offset, HeldOnDevice(lease, self._cache.device, offset)
        return None

    def evict(self, timeout_s: float) -> int:
        """Has those above `n_on_device` leave now, and waits for them, `timeout_s` at most.

        Returns:
            How many have left for that since the last call.
        """
        with self._lock:
            oldest = self._over()
        if oldest:
            self._cache.offload(*oldest, wait=True, timeout_s=timeout_s)
        with self._lock:
            self._forget_gone()
            gone, self._gone = self._gone, 0
        return gone

    def evict_all(self) -> int:
        """Drops all of them; leases stay right. What is on its way to the host tier has arrived when this returns, or
        never does.

        Returns:
            How many there were.
        """
        with self._lock:
            self._forget_gone()
            residents = dict(self._residents)
            self._residents.clear()
            self._gone = 0
        for resident in residents.values():
            resident.unwanted = True
        with self._to_host.storing:
            copies = [resident.copy for resident in residents.values() if resident.copy is not None]
        for copy in copies:
            with suppress(TimedOut):
                copy.wait(self._cache.client.timeout_s)
        return self._cache.delete(*residents) if residents else 0

    def __len__(self) -> int:
        with self._lock:
            self._forget_gone()
            return len(self._residents)

    # ---- inside

    def _over(self) -> list[bytes]:
        """The oldest above `n_on_device`, which are going to be sent away. Holds the lock."""
        self._forget_gone()
        oldest = list(self._residents)[: max(0, len(self._residents) - self._n_on_device)]
        for key in oldest:
            self._residents[key].offered = True
        return oldest

    def _forget_gone(self) -> None:
        """Takes out of the list what has expired, and what the device has no more. Holds the lock."""
        now = time.monotonic()
        for key, resident in list(self._residents.items()):
            if resident.ends_at is not None and resident.ends_at <= now:
                self._cache.delete(key)
            elif self._cache.contains(key):
                continue
            else:
                self._gone += resident.offered and resident.is_in_host
            del self._residents[key]

    def after_fork_in_child(self) -> None:
        """The tensors are the parent's, and its lock may be held by a thread that is not here. For the library."""
        self._lock, self._to_host.storing = threading.Lock(), threading.Lock()
        self._residents = OrderedDict()
        self._gone = 0


class _ToHost:
    """What the DeviceCache does with a copy of a sequence: stores it as blocks. `storing` is held meanwhile."""

    __slots__ = ("_block_tokens", "_client", "_namespace", "storing")

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._namespace = namespace
        self._block_tokens = block_tokens
        self.storing = threading.Lock()

    def chain(self, sequence: PrefixSequence) -> list[Keyed]:
        return sequence.chain(self._namespace, self._block_tokens)

    def __call__(self, tree: Any) -> PrefixPut:
        resident: Resident = tree["resident"]
        now = time.monotonic()
        left_s = None if resident.ends_at is None else resident.ends_at - now
        with self.storing:
            if resident.unwanted or (left_s is not None and left_s <= 0):
                return PrefixPut().settle("refused", Refusal("the sequence has expired, or was evicted"))
            sequence = replace(resident.sequence, layers=layers_from(resident.sequence.layers, tree), ttl_s=left_s)
            resident.copy = store(self._client, sequence, self.chain(sequence), now + self._client.timeout_s)
            return resident.copy


_all: Final[WeakSet[DeviceSequences]] = WeakSet()


def _in_child() -> None:
    for sequences in list(_all):
        sequences.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
