"""The URLs of remote stores: the store that each names, its options, and messages that show no password.

Owns: the table of schemes, and reading the options behind the question mark. Does not own: which options a store has. A
module of a store is imported when its scheme is used, so that only a store in use needs its client library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ...errors import BadConfiguration
from .store import RemoteStore

_SCHEMES: Final = {
    "dir": (".directory", "DirectoryStore"),
    "mooncake": (".mooncake", "MooncakeStore"),
    "redis": (".valkey", "ValkeyStore"),
    "rediss": (".valkey", "ValkeyStore"),
    "valkey": (".valkey", "ValkeyStore"),
    "valkeys": (".valkey", "ValkeyStore"),
}
"""For each scheme the module and the class of its store."""


def open_store(url: str, timeout_s: float = 5.0) -> RemoteStore:
    """The store of `url`, such as dir:///mnt/tensord?bytes=100GiB. Connects to nothing: the first call does.

    Raises:
        BadConfiguration: the scheme is unknown, an option is wrong, or the client library is not installed. The message
            names what to change.
    """
    scheme = split(url).scheme
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise BadConfiguration(f"{scheme or 'no scheme'}: is no kind of remote store; a URL begins with {known}")
    module, name = _SCHEMES[scheme]
    kind: Any = getattr(import_module(module, __package__), name)
    store: RemoteStore = kind.of_url(url, timeout_s)
    return store


def split(url: str) -> SplitResult:
    """The parts of a store's URL.

    Raises:
        BadConfiguration: `url` is not a URL, or has a fragment.
    """
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

    Raises:
        BadConfiguration: an option is unknown, given twice, or has a value that its reader refuses.
    """
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
    """A reader of these names alone."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return read
