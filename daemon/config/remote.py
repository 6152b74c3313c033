"""The configuration table [remote]: the store behind the ring, which several hosts share.

Owns: its settings and bounds, and how its URL is shown. Does not own the kinds of stores
(`daemon.remote_stores`), nor what is read from the store and written to it (daemon/remote).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final
from urllib.parse import urlsplit

from .sections import HOUR_S, MIB, TIB
from .settings import DURATION, HIDDEN, SIZE, SWITCH, Kind, setting


def _url(given: Any) -> str:
    if not isinstance(given, str) or not given.isprintable() or "://" not in given:
        raise ValueError
    return given.strip()


def shown(url: str) -> str:
    """The URL without its password."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return HIDDEN
    return url if not password else url.replace(f":{password}@", f":{HIDDEN}@", 1)


URL: Final = Kind("a URL such as dir:///mnt/tensord or valkey://HOST:PORT", _url, shown, secret=True)


@dataclasses.dataclass(frozen=True)
class RemoteSection:
    """A store that several hosts share: entries that this host misses are read from there, and new ones written."""

    url: str | None = setting(
        URL,
        """the store: dir://PATH, redis://, rediss://, valkey:// or valkeys://HOST:PORT, or mooncake://MASTER:PORT, with
        options; none: this host shares entries with no other""",
        None,
        optional=True,
    )
    timeout_s: float = setting(
        DURATION,
        """time in which the store must have answered a request. A client waits for the store at most as
        long, and at most as long as computing takes""",
        5.0,
        low=0.01,
        high=HOUR_S,
        reload=True,
    )
    write: bool = setting(SWITCH, "write entries to the store; false: this host only reads", True, reload=True)
    queue_bytes: int = setting(
        SIZE,
        "payload bytes that wait to be written; beyond that, entries are not written, and counted as dropped",
        256 * MIB,
        low=1 * MIB,
        high=16 * TIB,
        reload=True,
    )
