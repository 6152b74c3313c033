"""The last moments of a daemon that is stopped: puts that have wholly arrived are carried out and answered.

Owns: how long that may take. A connection that ended before its puts were answered would have its client take them for
lost, or send them again, though they are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final, Protocol

ENDING_S_MAX: Final = 2.0
"""Seconds until connections are closed, answered or not: a put may wait for room that never comes."""
_LOOK_EVERY_S: Final = 0.005


class Settling(Protocol):
    """What has something to finish."""

    @property
    def settled(self) -> bool:
        """Whether it has nothing left to do of what has arrived."""
        ...


class Hearing(Settling, Protocol):
    """A session."""

    def hear_no_more(self) -> None:
        """Takes up what has arrived, and nothing after it."""


async def finish(sessions: Collection[Hearing], store: Settling) -> None:
    """Waits until all that has arrived on `sessions` is carried out and answered, ENDING_S_MAX at most."""
    for session in list(sessions):
        session.hear_no_more()
    deadline = time.monotonic() + ENDING_S_MAX
    while time.monotonic() < deadline:
        if store.settled and all(session.settled for session in list(sessions)):
            return
        await asyncio.sleep(_LOOK_EVERY_S)
