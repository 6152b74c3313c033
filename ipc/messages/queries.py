"""The messages of the status socket: queries, and the documents that answer them. The daemon's actors build those."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from .declared import Answer, DaemonQuery, StatusRequest
from .schema import ENTRIES_MAX, Count, Key, NamespaceTag


class Event(Answer, frozen=True):
    """A push to a connection that sent Watch: one event in the daemon. `dropped`: how many before it were not sent."""

    body: dict[str, Any]
    dropped: Count = 0


class StatusQuery(DaemonQuery, frozen=True):
    """Asks for the sizes and counters of the store and the governor."""


class EntriesQuery(StatusRequest, frozen=True):
    """Asks for at most `count` entries, from the first one on, or behind the cursor `after`, which is `behind` of the
    answer before; there are no more if that is None. It means nothing to another daemon."""

    after: Key | None = None
    count: Annotated[int, Meta(ge=1, le=ENTRIES_MAX)] = 100
    namespace: NamespaceTag | None = None


class WhyQuery(StatusRequest, frozen=True):
    """Asks why the key's entry is still stored, or why it was removed."""

    key: Key


class AdviseQuery(StatusRequest, frozen=True):
    """Asks for the hit ratios that a ring of another size would give."""


class ClientsQuery(StatusRequest, frozen=True):
    """Asks for one row for each lane: its client, and the entries that it pins."""


class HealthQuery(DaemonQuery, frozen=True):
    """Asks whether the daemon is healthy, and for the findings that an operator has to look at."""


class ConfigQuery(StatusRequest, frozen=True):
    """Asks for every setting in force with its source, and for the verdict of the last reload."""


class LatencyQuery(StatusRequest, frozen=True):
    """Asks for histograms of the time from a request's arrival to its answer, by kind, and of the event loop's lag; and
    for the last requests that took longer than the setting log.slow_s, the latest first."""


class Watch(StatusRequest, frozen=True):
    """Answered by a Document; Events follow until the connection ends."""

    pushes = (Event,)
