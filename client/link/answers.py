"""Requests to the daemon, until each has its answer.

Owns: the table of the requests that wait for an answer, and how each is settled. Does not own: the connection, nor what
follows from an answer to a cancelled request (link.py).
Invariant: an answer settles its request once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Final

from ...errors import TensordError, TimedOut, without_frames
from ...ipc.messages import control as messages
from ..threads.waiting import LockFuture, let_greenlets_run
from .absence import Silence
from .listeners import Connected

OPTIONAL: Final = (messages.RequestClaim, messages.OpenRing, messages.OpenInbox)
"""Requests without whose answer the value is computed, or nothing is stored."""


class PendingRequest(LockFuture):
    """A request that waits for its answer.

    `waits`: true once the daemon answered "wait": another client computes the key, and a second answer follows.
    `expected_at`: when that client expects to have stored the key, by time.monotonic; 0 if unknown. `optional`: its
    caller can do without an answer, and does so once the daemon is away.
    """

    optional = False
    waits = False
    expected_at = 0.0


class Answers:
    """The pending requests of one client. No lock: each change of the table is one step.

    `send` and `next_id` are the link's; `path` is the daemon's socket, for messages of errors.
    """

    def __init__(
        self,
        send: Callable[..., None],
        next_id: Callable[[], int],
        path: Path,
        silence: Silence,
    ) -> None:
        self._send = send
        self._next_id = next_id
        self._path = path
        self._silence = silence
        self.pending: dict[int, PendingRequest] = {}
        """By their ids."""

    def ask(
        self,
        answer: PendingRequest,
        make: Callable[[int], messages.Message],
        timeout_s: float,
        connected: Connected | None,
        then: Callable[[Future[Any]], None] | None,
        fds: Sequence[int] = (),
    ) -> None:
        """As `Link.ask`, which calls it where no signal handler can interrupt it, with the future that it returns."""
        number = self._next_id()
        if then is not None:
            answer.add_done_callback(then)
        self.pending[number] = answer
        message = make(number)
        answer.optional = isinstance(message, OPTIONAL)
        try:
            self._send(message, fds=fds, timeout_s=timeout_s, connected=connected)
        except TensordError as error:
            # The end of the connection may have settled it before.
            if self.take(number) is not None:
                answer.set_exception(without_frames(error))

    def wait(self, future: Future[Any], timeout_s: float) -> Any:
        """Waits for an answer, and returns it.

        Raises:
            TimedOut: no answer within `timeout_s` seconds; the request is cancelled.
            DaemonUnavailable: the daemon does not answer for some time already; the request stays.
            TensordError: the daemon's error, or DaemonUnavailable.
        """
        deadline = time.monotonic() + timeout_s
        if self._silence.away and not future.done():
            raise self._silence.error()
        try:
            let_greenlets_run(future, timeout_s)
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not future.cancel():
                # The answer arrived in this moment. It may be a grant that the caller has to give back.
                return future.result()
            self._silence.timed_out()
            raise TimedOut(f"the daemon at {self._path} did not answer within {timeout_s:.3g} s") from None
        except BaseException:
            # Cancels the request if no answer has come; the daemon's own errors have settled it already.
            future.cancel()
            raise
        finally:
            # Breaks the cycle described in `ask`.
            del future

    def within(self, future: Future[Any], timeout_s: float) -> bool:
        """Waits until the future is settled, for at most `timeout_s` seconds. Returns whether it is."""
        let_greenlets_run(future, timeout_s)
        with suppress(TimeoutError, CancelledError):
            future.exception(max(0.0, timeout_s))
        return future.done()

    def take(self, number: int) -> PendingRequest | None:
        """Removes a request, whose answer has arrived or will not. None if it is not pending any more."""
        return self.pending.pop(number, None)

    def hand_over(self, number: int, fds: Sequence[int]) -> None:
        """Settles a request with the descriptors that came with its answer. Closes them if nobody waits any more."""
        answer = self.take(number)
        if answer is None or not settle(answer, fds):
            for fd in fds:
                os.close(fd)

    def deferred(self, message: messages.Claimed) -> None:
        """Handles the answer "wait". A second answer follows."""
        waiting = self.pending.get(message.id)
        if waiting is not None:
            waiting.expected_at = time.monotonic() + message.lasts_s if message.lasts_s else 0.0
            waiting.waits = True

    def fail_optional(self, error: TensordError) -> None:
        """Fails the requests whose callers can do without an answer. A claim that is granted all the same is given
        back."""
        for number, answer in list(self.pending.items()):
            if answer.optional and self.take(number) is not None:
                settle(answer, error=copy(error))

    def fail_all(self, error: TensordError) -> None:
        """Fails all pending requests."""
        while self.pending:
            with suppress(KeyError):
                # A copy for each caller, which raises it with a traceback of its own.
                settle(self.pending.popitem()[1], error=copy(error))


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> bool:
    """Settles a future. Returns False if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return False
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
    return True
