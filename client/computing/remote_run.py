"""Runs: entries that the daemon fetches together from its remote store, such as the blocks of a prompt.

Does not own: the order of the keys, nor what is done with the entries.
Invariants: once a run has ended, it stays so. While the daemon owes a client's run an answer that nobody waits for any
more, the client begins no other run.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from ...errors import TensordError
from ...ipc.messages import control as messages
from ..link.answers import Answers
from ..link.link import Link
from ..threads.waiting import LockEvent

FETCH_S: Final = 1.0
"""The most seconds that anybody waits for a run."""


class RemoteRun:
    """Fetches entries until one is missing. `keys`: those that are not in the ring, in order: an entry's parent comes
    before it. Without keys, the run has ended."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = keys
        self._until_s = time.monotonic() + FETCH_S
        self._ended = LockEvent()
        self._answers: Answers | None = None
        self.count = 0
        """Keys whose entries have been in the ring so far, from the first one on."""
        if not keys:
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether all is there that the daemon can fetch."""
        return self._ended.is_set()

    @property
    def pending(self) -> bool:
        """Whether waiting may gain more."""
        return not self.ended and time.monotonic() < self._until_s

    def is_late(self, link: Link) -> bool:
        """Whether the daemon still owes an answer that nobody waits for. In a forked process it owes none."""
        return not (self.ended or self.pending) and self._answers is link.answers

    def begin(self, link: Link) -> None:
        """Asks the daemon. Does not wait for the answer."""
        self._answers = link.answers
        if not self.ended:
            self._ask(link)

    def wait(self, until_s: float) -> None:
        """Waits while the run is pending, at most until `until_s` of `time.monotonic`."""
        self._ended.wait(max(0.0, min(until_s, self._until_s) - time.monotonic()))

    def _ask(self, link: Link) -> None:
        wanted = self._keys[self.count : self.count + link.limits.keys_per_request_max]
        link.ask(
            lambda number: messages.FetchRun(number, wanted), FETCH_S, then=lambda answer: self._answered(link, answer)
        )

    def _answered(self, link: Link, answer: Future[Any]) -> None:
        fetched = 0
        with suppress(TensordError):
            fetched = answer.result(0).count
        self.count += fetched
        if fetched and self.count < len(self._keys) and self.pending:
            self._ask(link)
        else:
            self._ended.set()


class RemoteRuns:
    """The runs of one client."""

    def __init__(self) -> None:
        self._last: RemoteRun | None = None

    def new(self, link: Link, keys: list[bytes]) -> RemoteRun:
        """A run that is to begin. It has ended if there is no remote store, or the daemon is late with an answer."""
        if not link.remote or (self._last is not None and self._last.is_late(link)):
            return RemoteRun([])
        self._last = run = RemoteRun(keys)
        return run
