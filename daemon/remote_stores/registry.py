"""Opens the remote store that a URL names.

Owns: the table of schemes. A module of a store is imported when its scheme is used, so that only a store in use needs
its client library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ...errors import BadConfiguration
from .store import RemoteStore
from .urls import split

_SCHEMES: Final = {
    "dir": (".directory", "DirectoryStore"),
    "mooncake": (".mooncake", "MooncakeStore"),
    "redis": (".valkey", "ValkeyStore"),
    "rediss": (".valkey", "ValkeyStore"),
    "valkey": (".valkey", "ValkeyStore"),
    "valkeys": (".valkey", "ValkeyStore"),
}
"""For each scheme the module and the class of its store."""


def open_store(url: str) -> RemoteStore:
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
    store: RemoteStore = kind.of_url(url)
    return store
