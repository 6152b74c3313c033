"""What a reader and the daemon say on the status socket: questions, and the documents that answer them.

Owns: names and fields. Does not own what a document says (the daemon's actors do).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from .declared import Answer, DaemonQuery, StatusRequest
from .schema import ENTRIES_MAX, Count, Id, Key, NamespaceTag


class Document(Answer, frozen=True):
    """Answers a query: a map of names, figures, lists and further maps."""

    id: Id
    body: dict[str, Any]


class Event(Answer, frozen=True):
    """A push to a watcher: something that happened in the daemon.

    `dropped`: the number of events before this one that the watcher missed.
    """

    body: dict[str, Any]
    dropped: Count = 0


class StatusQuery(DaemonQuery, frozen=True):
    """Asks for the sizes and counters of the store and the governor."""

    answered_by = Document


class EntriesQuery(StatusRequest, frozen=True):
    """Asks for the next `count` entries behind the key `after`."""

    answered_by = Document
    after: Key | None = None
    count: Annotated[int, Meta(ge=1, le=ENTRIES_MAX)] = 100
    namespace: NamespaceTag | None = None


class WhyQuery(StatusRequest, frozen=True):
    """Asks why the key's entry stays, or why it went."""

    answered_by = Document
    key: Key


class GoneQuery(StatusRequest, frozen=True):
    """Asks for up to `count` keys of entries that went, the latest first, which begin with the first `digits`
    hexadecimal digits of `key`.
    """

    answered_by = Document
    key: Key
    digits: Annotated[int, Meta(ge=1, le=64)]
    count: Annotated[int, Meta(ge=1, le=64)] = 8


class ClientsQuery(StatusRequest, frozen=True):
    """Asks for one row for each lane: whose it is, and what it pins."""

    answered_by = Document


class HealthQuery(DaemonQuery, frozen=True):
    """Asks whether the daemon is healthy, and for what an operator has to look at."""

    answered_by = Document


class Watch(StatusRequest, frozen=True):
    """Answered by a Document; Events follow until the connection ends."""

    answered_by = Document
    pushes = (Event,)
