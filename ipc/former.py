"""The former protocol version: what a peer that speaks it does not understand.

Version 4 differs from version 3 in three requests. Everything else that was added since are messages, which a daemon of
version 3 refuses one by one, and fields with a default, which it ignores.

| | version 3 | version 4 |
|---|---|---|
| a payload that stands whole in the inbox | a Commit and one Part | a Commit with `at` |
| a put in place | a Commit with `in_place`, Placed and Fill | TakeSpan and a Commit with `span` |
| an agent whose turn begins | | AgentTurn "began" |

Owns: the order in which a client offers versions, the translation of requests, and the refusal of those that cannot be
translated. Does not own the version of a connection (`connection`).

Invariant: neither side writes in place on a connection of version 3, so its payloads go through the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from ..errors import LimitReached, VersionMismatch
from . import messages as m
from .schema import PROTOCOL_FORMER, PROTOCOL_VERSION, Message

_WHY = (
    f"this connection speaks protocol version {PROTOCOL_FORMER}, and {{what}} version {PROTOCOL_VERSION}: "
    "install the same release of tensord on both sides"
)

Begun = TypeVar("Begun")


def offered(begin: Callable[[int], Begun]) -> Begun:
    """A connection that `begin(version)` made: of this version, or if the daemon refuses that, of the former one.

    Raises:
        VersionMismatch: the daemon refuses both.
    """
    try:
        return begin(PROTOCOL_VERSION)
    except VersionMismatch as refused:
        try:
            return begin(PROTOCOL_FORMER)
        except VersionMismatch:
            raise refused from None


def spoken(messages: Sequence[Message]) -> Iterator[Message]:
    """The requests of a client to a daemon of the former version."""
    for message in messages:
        if isinstance(message, m.Commit) and message.at is not None:
            yield replace(message, at=None)
            yield m.Part(message.id, message.at, message.payload_bytes, True)
        else:
            yield message


def refusal(message: Message) -> LimitReached | None:
    """Why a request cannot be sent to, or taken from, a peer of the former version; None if it can."""
    if isinstance(message, m.OpenRing):
        return LimitReached(_WHY.format(what="puts in place need"))
    if isinstance(message, m.AgentTurn) and message.state == "began":
        return LimitReached(_WHY.format(what="the beginning of an agent's turn needs"))
    return None


def refusal_of_put(found: Any) -> LimitReached | None:
    """Why a Commit of the former version is refused; None if it is none, or one with a payload in its inbox.

    A process that wrote in place before the daemon was upgraded goes on to.
    """
    if type(found) is dict and found.get("type") == "Commit" and found.get("in_place"):
        return LimitReached(_WHY.format(what="puts in place need"))
    return None
