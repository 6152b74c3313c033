"""Encoder outputs that a worker keeps on its card, for inputs that vLLM's own encoder cache has dropped.

Owns: which outputs are kept there, and their budget; that they leave when the engine sleeps. Does not own: the tensors
and the daemon's orders for them (device/cache.py), what is loaded (the scheduler's side, which says "hit" only of an
entry that it holds in the ring), nor any load from the ring.

    absent → on the card    the background thread promotes an entry of the ring, if the card has room for it
    on the card → lent      while vLLM's encoder cache has the tensor; an order of the daemon waits until it has not
    on the card → absent    on an order, for a newer entry (the budget), at a sleep, at the end

Invariants
- An output is lent only if the ring's entry of its key has the checksum of the entry that it was copied from. So it is
  what a load from the ring would be.
- No failure here reaches a step: it loads from the ring instead. A step waits for neither the daemon nor a copy.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, Final

import torch

from ...errors import TensordError
from ..core.cache import Client
from ..device.cache import DeviceCache
from ..device.interface import Device
from ..device.torch_device import TorchDevice
from .hooks import hook
from .stats import LookupCounts

REFUSED_S: Final = 5.0
"""Seconds for which nothing is kept after the card had no room, or the daemon gave no answer."""
LEAVE_S: Final = 2.0
"""The most seconds that a sleep waits for outputs that are copied to the ring."""
_opening: Final = Lock()
_alive: Final[weakref.WeakSet[CardOutputs]] = weakref.WeakSet()
_log = logging.getLogger("tensord")


def card_of(device: torch.device) -> Device:
    """The card of a worker's tensors.

    Raises:
        UsageError: `device` is no GPU, or its name is unknown.
    """
    return TorchDevice(device)


def card_outputs(device: torch.device, bytes_max: int, counts: LookupCounts) -> CardOutputs | None:
    """The outputs on a worker's card, none so far; None, with a line in the log, if the card cannot be used."""
    try:
        card = card_of(device)
    except Exception as error:
        _log.warning("tensord: tensord.device_bytes_max has no effect: %s", error)
        return None
    _follow_sleep()
    return CardOutputs(card, bytes_max, counts)


class CardOutputs:
    """The outputs on one card. `bytes_max`: the most bytes of them, without those that vLLM's encoder cache still has.

    `begin` and `keep` are called by the background thread, `lent` by the step's thread, `leave` and `awake` by vLLM's
    thread between two steps.
    """

    def __init__(self, card: Device, bytes_max: int, counts: LookupCounts) -> None:
        self._card = card
        self._bytes_max = bytes_max
        self._counts = counts
        # Held while entries come or leave, not while one is lent.
        self._lock = Lock()
        self._held: DeviceCache | None = None
        self._asleep = False
        self._ended = False
        self._told = False
        self._not_before = 0.0
        # The checksum of the ring's entry, and the very tensor that was copied from it. The last used one is the last.
        self._kept: dict[bytes, tuple[int, weakref.ref[Any]]] = {}
        _alive.add(self)

    # ---- the background thread

    def begin(self, client: Client) -> None:
        """Opens the cache on the card with the worker's client, at the first call."""
        with self._lock, _opening:
            if self._held is not None or self._ended:
                return
            try:
                self._held = DeviceCache(client, self._card)
            except Exception as error:
                self._ended = True
                _log.warning("tensord: tensord.device_bytes_max has no effect: %s", error)
                return
        _log.info("tensord: up to %d bytes of encoder outputs are kept on card %s", self._bytes_max, self._card.name)

    def keep(self, key: bytes, client: Client) -> None:
        """Copies the ring's entry of the key to the card, if the card stays below pressure with it."""
        with self._lock:
            held = self._held
            if held is None or self._ended or self._asleep or self._card.paused or time.monotonic() < self._not_before:
                return
            if key in self._kept and held.contains(key):
                return
            try:
                self._keep(held, key, client)
            except Exception:
                self._not_before = time.monotonic() + REFUSED_S
                self._tell("an output could not be kept on the card")

    def _keep(self, held: DeviceCache, key: bytes, client: Client) -> None:
        entry = client.peek(key)
        if entry is None or not self._makes_room(held, entry.payload_bytes):
            return
        self._kept.pop(key, None)
        held.delete(key)
        lease = held.get(key, promote=True)
        if lease is None:
            return
        with lease:
            if lease.tier != "device":
                self._not_before = time.monotonic() + REFUSED_S
                return
            after = client.peek(key)
            if after is not None and after.checksum == entry.checksum and isinstance(lease.tree, torch.Tensor):
                self._kept[key] = entry.checksum, weakref.ref(lease.tree)
                self._counts.add("device_kept")
                return
        # The ring's entry was replaced meanwhile, so it is not known which one was copied.
        held.delete(key)

    def _makes_room(self, held: DeviceCache, size_bytes: int) -> bool:
        """Deletes the outputs that were not used for the longest time until there is room within the budget."""
        if size_bytes > self._bytes_max:
            return False
        for key in list(self._kept):
            if not held.contains(key):
                self._kept.pop(key, None)
        for key in list(self._kept):
            if held.size_bytes + size_bytes <= self._bytes_max:
                break
            self._kept.pop(key, None)
            held.delete(key)
        return held.size_bytes + size_bytes <= self._bytes_max

    # ---- the step's thread

    def lent(self, key: bytes, checksum: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The output of the key from the card. It leaves the card no sooner than the returned tensor is dropped.

        Args:
            checksum, shape, dtype: of the ring's entry of the key. An output that differs is deleted.
        """
        try:
            return self._lent(key, checksum, shape, dtype)
        except Exception:
            self._tell("an output on the card could not be used")
            return None

    def _lent(self, key: bytes, checksum: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        held, kept = self._held, self._kept.pop(key, None)
        if held is None or kept is None or not held.contains(key):
            return None
        lease = held.get(key)
        if lease is None:
            return None
        copied, found = kept[1](), lease.tree
        if lease.tier != "device" or copied is None or found is not copied:
            lease.release()
            return None
        if kept[0] != checksum or tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            lease.release()
            held.delete(key)
            return None
        self._kept[key] = kept
        lent: torch.Tensor = found.detach()
        # Released with the last reference to this tensor, which vLLM's encoder cache has.
        lent.tensord_lease = lease  # type: ignore[attr-defined]
        return lent

    def _tell(self, what: str) -> None:
        """Logs the exception that is being handled, if it is the first one."""
        if not self._told:
            self._told = True
            _log.exception("tensord: %s; it is loaded from the ring", what)

    # ---- sleep, and the end

    def leave(self) -> None:
        """Empties the card: outputs that the ring does not have are offloaded, the others dropped. Waits at most
        LEAVE_S seconds for the copies. Nothing is kept until `awake`."""
        with self._lock:
            self._asleep = True
            held = self._held
            if held is None or held.closed:
                return
            try:
                alone = [key for key in list(self._kept) if not held.client.contains(key)]
                held.offload(*alone, wait=True, timeout_s=LEAVE_S)
            except TensordError as error:
                _log.info("tensord: outputs on the card are dropped, not offloaded: %s", error)
            self._kept.clear()
            held.clear()
            freed_bytes = self._card.give_back()
        _log.info(
            "tensord: this engine sleeps, and its encoder outputs have left the card: %d bytes freed", freed_bytes
        )

    def awake(self) -> None:
        """Outputs are kept again."""
        self._asleep = False

    def close(self) -> None:
        """Drops all outputs. Idempotent."""
        with self._lock:
            self._ended = True
            if self._held is not None:
                self._held.close()
            self._kept.clear()


def _follow_sleep() -> None:
    """Has the workers' outputs leave their cards before vLLM's workers of this process sleep."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    for worker in (CPUWorker, Worker):
        hook(worker, "sleep", _leaving)
        hook(worker, "wake_up", _awaking)


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        for outputs in list(_alive):
            try:
                outputs.leave()
            except Exception:
                _log.exception("tensord: encoder outputs may have stayed on the card")
        return original(self, *args, **kwargs)

    return sleep


def _awaking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for outputs in list(_alive):
            outputs.awake()
        return result

    return wake_up
