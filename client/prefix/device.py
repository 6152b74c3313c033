"""Sequences whose arrays stay on a device: the newest ones of a PrefixCache, matched in this process without a copy.

Each sequence is one entry of the DeviceCache. When it leaves the device, it becomes blocks in the host tier, where
every process can match it. Above `n_on_device` the oldest ones leave. A sequence that a match holds leaves once the
match is released. A sequence that the host tier refuses stays until the next put or `evict`.

Owns: the list of sequences, in the order of their puts, and the search in it. Does not own: the tensors, nor when an
eviction order takes them (the DeviceCache does), nor the blocks in the host tier (put.py).
Invariants: an entry of the list may have left the device, and is then no match. The DeviceCache's callbacks hold no
reference to this object, so an unused PrefixCache can be collected.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from ...errors import Refusal, TensordError, TimedOut
from ...shm.payloads.prefix import Media, Tokens
from ..threads import forks
from ..writing.outcomes import PutState
from .keys import Keyed
from .layers import Layers
from .match import Held
from .put import PrefixPut, PrefixSequence, store
from .resident import HeldOnDevice, Resident, layers_from, longest, resident_of, tree_of

if TYPE_CHECKING:
    from ..arguments.namespace import Namespace
    from ..core.client import Client
    from ..device.cache import DeviceCache
    from ..device.registration import Registration

__all__ = ["DevicePut", "DeviceSequences"]


class DevicePut(PrefixPut):
    """The put of a sequence that stays on the device. `state` is

    - "sent": this process can match it. The daemon has not answered, or there is no daemon yet.
    - "stored": the daemon counts it, and orders its eviction when needed.
    - "refused", "lost": the sequence is not on the device; `error` says why.

    If it was offloaded before the daemon counted it, the state is that of its put into the host tier.
    """

    __slots__ = ("_client", "_registration", "_resident")

    def __init__(self, blocks: int, client: Client, resident: Resident, registration: Registration) -> None:
        super().__init__(blocks, len(resident.sequence.layers.snapshots))
        self._client = client
        self._resident = resident
        self._registration = registration

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the put leaves the state "sent". Returns at once without a daemon.

        Raises:
            TimedOut: the daemon did not answer within `timeout_s` seconds; the sequence stays.
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
    """The sequences of one PrefixCache on one device. Thread-safe. The child of a fork starts with none.

    Args:
        cache: the device cache that holds the sequences.
        n_on_device: how many stay. Beyond that, the oldest are offloaded to the host tier.
    """

    def __init__(self, cache: DeviceCache, namespace: Namespace, block_tokens: int, n_on_device: int) -> None:
        self._cache = cache
        self._namespace = namespace
        self._n_on_device = n_on_device
        self._to_host = _ToHost(cache.client, namespace, block_tokens)
        self._lock = threading.Lock()
        self._residents: OrderedDict[bytes, Resident] = OrderedDict()
        self._gone = 0
        forks.follow(self, forks.Place.DEVICE_SEQUENCES)

    def holds(self, layers: Layers) -> bool:
        """Whether some of the arrays lie on the device.

        Raises:
            UsageError: an array lies on another device.
        """
        return bool(self._cache.device.memory_of(tree_of(layers, None)))

    def put(self, sequence: PrefixSequence) -> PrefixPut:
        """Keeps a sequence without copying its arrays, which must not be written any more. Replaces a sequence with the
        same tokens, media and layout, and takes the newest place in the order.
        """
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
            kind="kv",
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
        """The longest prefix of a query that a sequence here has, and that its layers can rewind to. Of equally long
        ones, the oldest sequence's.

        Returns:
            The number of tokens, and the leased sequence; None on a miss.
        """
        with self._lock:
            self._forget_gone()
            residents = list(self._residents.items())
        found = [(offset, key) for key, resident in residents if (offset := longest(resident.sequence, query, media))]
        for _, key in sorted(found, key=lambda one: -one[0]):
            lease = self._cache.get(key) if self._cache.contains(key) else None
            if lease is None or lease.tier != "device":
                continue
            # If a replacing put was refused meanwhile, the former sequence is still there under the key.
            resident = lease.tree["resident"]
            offset = longest(resident.sequence, query, media)
            if offset:
                return offset, HeldOnDevice(lease, self._cache.device, offset)
        return None

    def evict(self, timeout_s: float) -> int:
        """Offloads the sequences above `n_on_device` now, and waits for that, at most `timeout_s` seconds.

        Returns:
            How many were offloaded for that since the last call.
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
        """Drops all sequences. Leases stay valid. A copy on its way to the host tier has arrived when this returns, or
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

    # ---- internal

    def _over(self) -> list[bytes]:
        """The oldest sequences above `n_on_device`; marks them as offered to the host tier. The caller
        holds the lock.
        """
        self._forget_gone()
        oldest = list(self._residents)[: max(0, len(self._residents) - self._n_on_device)]
        for key in oldest:
            self._residents[key].offered = True
        return oldest

    def _forget_gone(self) -> None:
        """Removes sequences that have expired or left the device. The caller holds the lock."""
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
        """The tensors belong to the parent, and a thread of the parent may have held the lock. For the library."""
        self._lock, self._to_host.storing = threading.Lock(), threading.Lock()
        self._residents = OrderedDict()
        self._gone = 0


class _ToHost:
    """The DeviceCache's callback for an offloaded sequence: stores it as blocks. Holds `storing` meanwhile."""

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
                return PrefixPut().settle("refused", Refusal("the sequence has expired or was evicted"))
            sequence = replace(resident.sequence, layers=layers_from(resident.sequence.layers, tree), ttl_s=left_s)
            resident.copy = store(self._client, sequence, self.chain(sequence), now + self._client.timeout_s)
            return resident.copy
