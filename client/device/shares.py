"""Bytes of the device by entry, where several entries are views of one storage.

A storage is the memory behind a tensor, and behind all views of it. It is free only when the last view goes. So a
storage counts once, and each entry that has a view of it counts an equal share of it, whatever the size of its view.
When one of n entries goes, the shares of the others grow, and the total stays: nothing was freed.

Owns: the storages of one table's entries, and who holds each. Does not own: the entries, nor what the daemon knows of
their sizes (ledger.py).

Invariants: the bytes of all storages are the exact total. The shares of one storage add up to its bytes, or to less
than one byte a holder more. A change of shares costs constant time on average, however many entries a storage has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Protocol

__all__ = ["Holder", "Shares", "SharedStorage"]

_EXACT_MAX: Final = 32
"""Holders of a storage up to which each change of their shares is reported. Beyond that, a change is reported once the
shares differ by an eighth, so that the views of an engine's whole KV memory cost no message for every pair of them."""


class SharedStorage:
    """Memory of `bytes` bytes. `reported`: the number of holders when their shares were last reported."""

    __slots__ = ("bytes", "holders", "reported")

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        self.holders: dict[int, Holder] = {}
        self.reported = 0

    @property
    def share_bytes(self) -> int:
        """The bytes that each holder counts."""
        return -(-self.bytes // max(1, len(self.holders)))


class Holder(Protocol):
    """An entry. `key`, `serial`: which one. `memory`: the bytes of its storages, by what identifies a storage. `held`:
    these storages, while the entry is counted; else empty."""

    key: bytes
    serial: int
    memory: Mapping[Hashable, int]
    held: tuple[SharedStorage, ...]


class Shares:
    """The storages of one table's entries. `bytes`: their total."""

    def __init__(self) -> None:
        self.bytes = 0
        self._storages: dict[Hashable, SharedStorage] = {}

    def add(self, holder: Holder) -> Iterable[Holder]:
        """Counts an entry. Returns the entries whose share has changed and is to be reported."""
        held: list[SharedStorage] = []
        for identity, size_bytes in holder.memory.items():
            storage = self._storages.get(identity)
            if storage is None:
                storage = self._storages[identity] = SharedStorage(size_bytes)
                self.bytes += size_bytes
            storage.holders[holder.serial] = holder
            held.append(storage)
        holder.held = tuple(held)
        return _changed(held)

    def remove(self, holder: Holder) -> Iterable[Holder]:
        """Counts an entry no more. Returns as `add`."""
        held, holder.held = holder.held, ()
        for storage in held:
            del storage.holders[holder.serial]
        for identity in holder.memory:
            storage = self._storages[identity]
            if not storage.holders:
                del self._storages[identity]
                self.bytes -= storage.bytes
        return _changed(held)

    def clear(self) -> None:
        """Counts nothing. Ends the references between storages and entries: the tensors are freed at once, and not by
        the garbage collector."""
        for storage in self._storages.values():
            for holder in storage.holders.values():
                holder.held = ()
            storage.holders.clear()
        self._storages.clear()
        self.bytes = 0

    def check_invariants(self, holders: Iterable[Holder]) -> None:
        """Asserts that exactly these entries are counted."""
        known = {holder.serial: holder for holder in holders}
        assert self.bytes == sum(storage.bytes for storage in self._storages.values())
        for storage in self._storages.values():
            assert storage.holders and all(storage.holders[serial] is known.get(serial) for serial in storage.holders)
            assert storage.bytes <= storage.share_bytes * len(storage.holders) < storage.bytes + len(storage.holders)
        for holder in known.values():
            assert [self._storages[identity] for identity in holder.memory] == list(holder.held)


def _changed(storages: Iterable[SharedStorage]) -> Iterable[Holder]:
    found: dict[int, Holder] = {}
    for storage in storages:
        count = len(storage.holders)
        if max(count, storage.reported) <= _EXACT_MAX or 8 * abs(count - storage.reported) >= storage.reported:
            storage.reported = count
            found |= storage.holders
    return found.values()
