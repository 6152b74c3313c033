"""The interface of remote stores, what all of them do alike, and the URLs that name them.

Owns: the interface, the count of corrupt objects, the table of schemes, and reading the options behind a URL's question
mark. Does not own: any connection or file, which options a store has, nor the decision what is stored. The module of a
store is imported when its scheme is used, so that only a store in use needs its client library.

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
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ...errors import BadConfiguration, Corrupt, TierTimedOut, TierUnavailable
from ..forms.events import RemoteEntry
from .form import OBJECT_FORMAT, Buffer, check

NAME: Final = f"tensord-{OBJECT_FORMAT}"
"""What the names of all objects begin with, so that builds of different formats share no object."""
_SCHEMES: Final = {
    "dir": (".directory", "DirectoryStore"),
    "mooncake": (".mooncake", "MooncakeStore"),
    "redis": (".valkey", "ValkeyStore"),
    "rediss": (".valkey", "ValkeyStore"),
    "valkey": (".valkey", "ValkeyStore"),
    "valkeys": (".valkey", "ValkeyStore"),
}
"""For each scheme the module and the class of its store."""


class HostClaim(NamedTuple):
    """Whose a claim is: that of the one who has asked for it, or of another host, since `age_s` seconds."""

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
        """Reads an object into a writable, contiguous buffer of bytes: header, then payload. None for a miss, as an
        object is that is longer than the buffer."""

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
        """The generations of namespaces that the store has given out last; 0 for one that was never raised. Raises
        TierRefused if one of them is no number; the message names what to remove."""

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
        return TierTimedOut(
            f"{self.address} has not answered within {self.timeout_s:g} s: the store or the way to it is slow or "
            "stopped; the call counts as a miss"
        )

    def _was_closed(self) -> TierUnavailable:
        return TierUnavailable(f"{self.address} was closed by this process: open a new store")


def open_store(url: str, timeout_s: float = 5.0) -> RemoteStore:
    """The store of `url`, such as dir:///mnt/tensord?bytes=100GiB. Connects to nothing: the first call does. Raises
    BadConfiguration if the scheme is unknown, an option is wrong, or the client library is not installed."""
    scheme = split(url).scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise BadConfiguration(f"{scheme or 'no scheme'}: is no kind of remote store; a URL begins with {known}")
    module, name = _SCHEMES[scheme]
    kind: Any = getattr(import_module(module, __package__), name)
    store: RemoteStore = kind.of_url(url, timeout_s)
    return store


def split(url: str) -> SplitResult:
    """The parts of a store's URL. Raises BadConfiguration if `url` is none, or has a fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is no number
    except ValueError:
        # The error would show a part of the URL, which may be a password's.
        raise BadConfiguration(
            "the URL of a remote store cannot be read: its port is no number, or its host has characters that no host "
            "has; in a user or password, write / ? # @ and : as %2F %3F %23 %40 and %3A"
        ) from None
    if port == 0:
        raise BadConfiguration("the URL of a remote store has a port 0: port 0 is none; write the server's")
    if "#" in url:
        # It would be cut off, and a directory of another name used.
        raise BadConfiguration("the URL of a remote store has a #, which begins no part of it: write it as %23")
    return parts


def shown(url: str) -> str:
    """`url` without user, password and options, for messages."""
    parts = split(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def options(url: str, kinds: Mapping[str, tuple[Callable[[str], Any], str]]) -> dict[str, Any]:
    """The options of `url`, by name. `kinds` has for each the reader, which raises ValueError, and what it wants.
    Raises BadConfiguration if an option is unknown, given twice, or has a value that its reader refuses."""
    found: dict[str, Any] = {}
    for name, text in parse_qsl(split(url).query, keep_blank_values=True):
        if name not in kinds:
            raise BadConfiguration(
                f"{shown(url)} has the unknown option {name!r}; the options are {', '.join(sorted(kinds))}"
            )
        if name in found:
            raise BadConfiguration(f"{shown(url)} has the option {name!r} twice; give it once")
        read, wants = kinds[name]
        try:
            found[name] = read(text)
        except ValueError:
            raise BadConfiguration(f"{shown(url)}: {name} = {text!r} must be {wants}") from None
    return found


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return read
