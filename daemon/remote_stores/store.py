"""The interface of remote stores, and what all of them do alike.

Owns: the interface, and the count of corrupt objects. Does not own: any connection or file, nor the decision what is
stored.

Rules for all stores:
- Calls block. They may come from several threads at once, and never from the event loop.
- A server that does not answer for `timeout_s` is an error. A directory has no limit but its file system's.
- After a call has returned or raised, the store does not touch the caller's buffers any more. What is left in the
  buffer of a read that found nothing is undefined.
- A wrong object is a miss: `corrupt` counts it, and `last_corrupt` says what was wrong. The entry may be put again.
- `look` is a hint: an object may be gone, damaged, or another one, when it is read.
- A store is not used after a fork in the child; the child opens one of its own.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...errors import Corrupt, TierTimedOut, TierUnavailable
from ..forms.events import RemoteEntry
from .form import OBJECT_FORMAT, Buffer, check

NAME: Final = f"tensord-{OBJECT_FORMAT}"
"""What the names of all objects begin with, so that builds of different formats share no object."""


class HostClaim(NamedTuple):
    """Who has a claim: the one who has asked for it, or another host, since `age_s` seconds."""

    mine: bool
    age_s: float = 0.0


class RemoteStore(ABC):
    """A store behind the ring, shared by hosts. `address` names it without credentials, for messages.

    Raises, in every call:
        TierUnavailable: the store cannot be reached, has failed, or was closed.
        TierTimedOut: the store has not answered in time. A subclass of TierUnavailable.
        TierRefused: the store refuses the credentials, the call, or access to a folder.
        TierReadOnly: the store takes no writes, and can be read. Raised by what writes only. A subclass of TierRefused.
        TierFull: the store has no room. Raised by what writes only.
        TierTooLarge: the store never has room for the object. A subclass of TierFull.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.corrupt = 0
        """How many wrong objects were read."""
        self.last_corrupt = ""
        self._counting = threading.Lock()

    @abstractmethod
    def look(self, keys: Sequence[bytes]) -> tuple[int, list[RemoteEntry | None]]:
        """The generation of the keys' namespace, as `generations` has it, and what the header of each key's object
        says: its buffer must have OBJECT_HEADER_BYTES + payload_bytes. None if it is not stored. `keys`: at least one,
        all of one namespace."""

    @abstractmethod
    def get_into(self, key: bytes, buffer: memoryview) -> RemoteEntry | None:
        """Reads an object into a writable, contiguous buffer of bytes: header, then payload. None for a miss.

        An object that is longer than the buffer is a miss.
        """

    @abstractmethod
    def put_from(self, key: bytes, payload: Buffer, entry: RemoteEntry) -> None:
        """Stores the payload of `entry` under `key`, in place of what is stored there. Readers find the old object or
        the new one, never a part of either."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes the objects of keys, if they are stored."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections and calls under way. May be called more than once. Other calls raise TierUnavailable
        afterwards."""

    @abstractmethod
    def generations(self, tags: Sequence[bytes]) -> list[int]:
        """The generations of namespaces that the store has given out last; 0 for one that was never raised.

        Raises:
            TierRefused: one of them is no number. The message names what to remove.
        """

    @abstractmethod
    def raise_generation(self, tag: bytes, least: int) -> int:
        """Gives out a generation of a namespace: above all that were given out before, and at least `least`. No two
        callers get the same one."""

    def claim(self, key: bytes, owner: bytes, seconds: float) -> HostClaim | None:
        """Claims `key` for `owner` among all hosts, for at most `seconds`; a claim that `owner` has begins anew. None
        if the store has no means for claims: then every host computes for itself. All owners' names have one length."""
        return None

    def unclaim(self, key: bytes, owner: bytes) -> bool | None:
        """Ends a claim of `owner`. False if `owner` does not have the claim; None as for `claim`."""
        return None

    def _checked(self, key: bytes, stored: memoryview, *, header: bool = False) -> RemoteEntry | None:
        """What an object that was read holds; `header`: its header alone. A wrong one is counted, and a miss."""
        try:
            return check(key, stored, time.time(), header=header)
        except Corrupt as error:
            self._count_corrupt(str(error))
            return None

    def _count_corrupt(self, what: str) -> None:
        with self._counting:
            self.corrupt += 1
            self.last_corrupt = f"{self.address}: {what}"

    def timed_out(self) -> TierTimedOut:
        """The error of a call that has taken too long."""
        return TierTimedOut(
            f"{self.address} has not answered within {self.timeout_s:g} s: the store or the way to it is slow or "
            "stopped; the call counts as a miss"
        )

    def _was_closed(self) -> TierUnavailable:
        return TierUnavailable(f"{self.address} was closed by this process: open a new store")
