"""The configuration tables [limits], [quotas], [memory] and [log].

Owns: their settings, defaults and bounds. Does not own the rest of the tree (config.py). Each table can be constructed
alone with its defaults: `LimitsSection()`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from .settings import COUNT, DURATION, SHARE, SIZE, SWITCH, choice, setting

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S


@dataclasses.dataclass(frozen=True)
class LimitsSection:
    """The limits on clients, messages, payloads and requests. A refusal names the limit that was reached."""

    clients_max: int = setting(COUNT, "clients connected at once", 256, low=1, high=65_536, reload=True)
    lanes_max: int = setting(
        COUNT,
        """lanes that exist at once; a lane stays after its client's connection has ended, as long as the client's
        views live. Each takes about 250 KiB""",
        1024,
        low=1,
        high=65_536,
        reload=True,
    )
    object_bytes_max: int | None = setting(
        SIZE,
        "size of one payload with its tree header; none: the whole ring",
        None,
        low=4 * KIB,
        high=16 * TIB,
        optional=True,
        reload=True,
    )
    prefix_tokens_max: int = setting(
        COUNT,
        "tokens of one cached sequence, and of one query for a cached prefix",
        1 << 20,
        low=1024,
        high=1 << 24,
        reload=True,
    )
    prefix_wait_s: float = setting(
        DURATION,
        "the longest time that a query for a cached prefix waits while the index is rebuilt after a restart",
        1.0,
        low=0.0,
        high=60.0,
        reload=True,
    )
    claim_s: float = setting(
        DURATION,
        "time after which a claim ends unless its client renews it",
        10.0,
        low=0.05,
        high=DAY_S,
        reload=True,
    )
    claim_s_max: float = setting(
        DURATION,
        "time after which a claim ends, renewed or not; at least claim_s",
        120.0,
        low=0.05,
        high=DAY_S,
        reload=True,
    )


@dataclasses.dataclass(frozen=True)
class QuotasSection:
    """The share of the common resources that one uid or one client may use: docs/quotas.md."""

    limits_share_max: float = setting(
        SHARE,
        """share that one uid may use of the clients, the readers of the status socket, the lanes, the claims and the
        invalidated namespaces that there may be at once. Root and the daemon's own uid may use all""",
        0.75,
        low=0.001,
        high=1.0,
        reload=True,
    )
    requests_per_s_max: int = setting(
        COUNT,
        """requests a second of one uid's clients while other uids have clients; further requests wait. A query on
        the status socket counts as 20 requests. Root and the daemon's own uid never wait""",
        20_000,
        low=10,
        high=1 << 30,
        reload=True,
    )


@dataclasses.dataclass(frozen=True)
class MemorySection:
    """The allocation of the ring's memory."""

    prefault: bool = setting(
        SWITCH, "touch all pages of the ring in the background after the start, not at their first use", True
    )
    huge_pages: bool = setting(
        SWITCH,
        """request huge pages for the ring; has an effect if /dev/shm is mounted with huge=advise""",
        False,
    )


@dataclasses.dataclass(frozen=True)
class LogSection:
    """The daemon's log on standard error."""

    level: str = setting(
        choice("debug", "info", "warning", "error"),
        "the lowest level that is logged; debug has a line for each event, as `tensorctl watch` shows them",
        "info",
        reload=True,
    )
    format: str = setting(
        choice("auto", "console", "json"),
        "auto: JSON to the journal, key=value elsewhere; json: JSON on any stream, but for what Python and libraries "
        "print",
        "auto",
    )
    slow_s: float = setting(
        DURATION,
        "a request that takes longer from its arrival to its answer is kept for `tensorctl slowlog`",
        0.01,
        low=0.0,
        high=3600.0,
        reload=True,
    )
