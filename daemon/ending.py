"""Finishes the requests that have arrived when the daemon is stopped: complete puts are stored and answered.

Owns: the time that this may take. Does not own the sessions nor the store.

If connections were closed before the answers, clients would treat stored puts as lost, or send them again.

Invariant: after `finish` began, no session reads further requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final, Protocol

ENDING_S_MAX: Final = 2.0
"""Seconds after which connections are closed even if requests are unanswered. A put may wait for room that never
comes."""
_LOOK_EVERY_S: Final = 0.005


class Settling(Protocol):
    """A part of the daemon that may have requests in progress."""

    @property
    def settled(self) -> bool:
        """True if all requests that have arrived are finished."""
        ...


class ReadingSession(Settling, Protocol):
    """A session that can stop reading requests."""

    def stop_reading(self) -> None:
        """Handles the messages that have arrived, and reads no more."""


async def finish(sessions: Collection[ReadingSession], store: Settling) -> None:
    """Waits until all requests that have arrived on `sessions` are done and answered, for ENDING_S_MAX at most."""
    for session in list(sessions):
        session.stop_reading()
    deadline = time.monotonic() + ENDING_S_MAX
    while time.monotonic() < deadline:
        if store.settled and all(session.settled for session in list(sessions)):
            return
        await asyncio.sleep(_LOOK_EVERY_S)
