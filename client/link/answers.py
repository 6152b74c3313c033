"""What the daemon says: answers to requests, the claims that it grants, and what follows from each message.

Owns: the table of the requests that wait, which claims are renewed, and the list of the listeners, which receive what
the daemon sends unasked. Does not own: the connection (link.py), nor what the parts do with the messages that they get.
Invariants: an answer settles its request once. What is granted to a request that nobody waits for any more is given
back at once. A claim is renewed only while its request exists, and on the connection that it was granted on. A listener
that is added is told of the current connection. No lock: each change of a table is one step.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...errors import CANNOT_BE_STORED, TensordError, TimedOut, without_frames
from ...ipc.messages import control as messages
from ...ipc.messages.schema import TOKENS_MAX
from ...ipc.wire.blocking import BlockingChannel
from ..threads.aside import aside
from ..threads.waiting import LockFuture, let_greenlets_run

if TYPE_CHECKING:
    from .link import Link

_log = logging.getLogger("tensord")
Connected = BlockingChannel
"""Identifies one connection. The daemon keeps no state of it for the next."""
ListenerMessage = messages.ModeChanged | messages.Order | messages.Modes
SAY_S: Final = 1.0
"""Time limit for sending one message, in seconds, where no call waits for its answer."""
OPTIONAL: Final = (messages.RequestClaim, messages.OpenRing, messages.OpenInbox)
"""Requests without whose answer the value is computed, or nothing is stored."""


class PendingRequest(LockFuture):
    """A request that waits for its answer.

    `waits`: the daemon answered "wait": another client computes the key, and a second answer follows. `expected_at`:
    when that client expects to have stored the key, by time.monotonic; 0 if unknown. `optional`: its caller can do
    without an answer, and does so once the daemon is away.
    """

    optional = False
    waits = False
    expected_at = 0.0


class Answers:
    """The pending requests of one client. No lock: each change of the table is one step."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending: dict[int, PendingRequest] = {}
        """By their ids."""

    def ask(
        self,
        make: Callable[[int], messages.Message],
        timeout_s: float = SAY_S,
        *,
        connected: Connected | None = None,
        then: Callable[[Future[Any]], None] | None = None,
        fds: Sequence[int] = (),
    ) -> PendingRequest:
        """Sends a request, and returns the future of its answer. `make` builds the request from its id.

        The future fails with the daemon's error, or with DaemonUnavailable. `then` is called with the settled future:
        by the link's thread in the order of the answers, or at once if the request was not sent. `fds`: the descriptors
        that the request brings. `connected`: as for `Link.send`."""
        answer = PendingRequest()

        def send() -> None:
            number = self._link.next_id()
            if then is not None:
                answer.add_done_callback(then)
            self.pending[number] = answer
            message = make(number)
            answer.optional = isinstance(message, OPTIONAL)
            try:
                self._link.send(message, fds=fds, timeout_s=timeout_s, connected=connected)
            except TensordError as error:
                # The end of the connection may have settled it before.
                if self.pending.pop(number, None) is not None:
                    answer.set_exception(without_frames(error))

        aside(send)
        return answer

    def wait(self, future: Future[Any], timeout_s: float) -> Any:
        """Waits for an answer, and returns it, or raises its error. Raises TimedOut after `timeout_s` seconds, when the
        request is cancelled, and DaemonUnavailable while the daemon is away, when it stays."""
        deadline = time.monotonic() + timeout_s
        if self._link.silence.away and not future.done():
            raise self._link.silence.error()
        try:
            let_greenlets_run(future, timeout_s)
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not future.cancel():
                # The answer arrived in this moment. It may be a grant that the caller has to give back.
                return future.result()
            self._link.silence.timed_out()
            raise TimedOut(f"the daemon at {self._link.path} did not answer within {timeout_s:.3g} s") from None
        except BaseException:
            # Cancels the request if no answer has come; the daemon's own errors have settled it already.
            future.cancel()
            raise
        finally:
            # An error has this frame in its traceback, and the future has the error.
            del future

    def within(self, future: Future[Any], timeout_s: float) -> bool:
        """Waits until the future is settled, for at most `timeout_s` seconds. Returns whether it is."""
        let_greenlets_run(future, timeout_s)
        with suppress(TimeoutError, CancelledError):
            future.exception(max(0.0, timeout_s))
        return future.done()

    def received(self, message: Any, fds: Sequence[int], channel: Connected) -> None:
        """Handles a message, in the link's thread. Raises the error with which the daemon ends the connection."""
        link = self._link
        if isinstance(message, ListenerMessage):
            link.listeners.tell(lambda listener: listener.received(message, channel))
        match message:
            case messages.ModeChanged() | messages.Order():
                pass
            case messages.GrantsLent() | messages.PutRefused() | messages.Settled() | messages.PlacesWanted():
                link.puts.received(message)
            case messages.Error(id=None):
                raise message.to_error()
            case messages.Claimed(answer="wait"):
                # A second answer follows.
                if (waiting := self.pending.get(message.id)) is not None:
                    waiting.expected_at = time.monotonic() + message.lasts_s if message.lasts_s else 0.0
                    waiting.waits = True
            case messages.Error(id=int(number)) if number not in self.pending:
                link.puts.refused(number, message.to_error())
            case _:
                self._settle(message, fds)

    def _settle(self, message: Any, fds: Sequence[int]) -> None:
        """Settles the request of an answer. Gives back what it grants if nobody waits for it any more."""
        link, answer = self._link, self.pending.pop(message.id, None)
        is_error, is_grant = isinstance(message, messages.Error), isinstance(message, messages.Claimed)
        is_grant = is_grant and message.answer == "compute"
        if is_grant and answer is not None:
            # Before the request is settled: this thread is about to wait, and must know when to renew the claim.
            link.claims.hold(message.token, message.lasts_s, answer)
        result = fds if isinstance(message, messages.WritableRing) else message
        if answer is not None and settle(answer, result, message.to_error() if is_error else None):
            return
        for fd in fds:
            os.close(fd)
        if is_grant:
            link.claims.drop(message.token)
            link.send(messages.Abandon(message.token), connected=link.attached)
        elif isinstance(message, messages.Reserved):
            link.send(messages.ReleaseReservation(link.next_id(), message.reservation))

    def fail_all(self, error: TensordError, *, optional_only: bool = False) -> None:
        """Fails the pending requests; with `optional_only`, those whose callers can do without an answer."""
        for number, answer in list(self.pending.items()):
            if (answer.optional or not optional_only) and self.pending.pop(number, None) is not None:
                # A copy for each caller, which raises it with a traceback of its own.
                settle(answer, error=copy(error))


def settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> bool:
    """Settles a future. Returns False if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return False
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
    return True


_RENEWALS: Final = 3
"""How often a claim is renewed within its lifetime."""


class HeldClaims:
    """The claims that the daemon granted to one client, until they are committed or given back."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.held: dict[int, tuple[float, weakref.ref[PendingRequest]]] = {}
        """By its token: how long a claim lasts, in seconds, and the request that it was granted to."""
        self.renew_at = 0.0
        """When the next claim is to be renewed, by time.monotonic. Has no meaning while none is held."""

    def hold(self, token: int, lasts_s: float, asked: PendingRequest) -> None:
        """Renews a claim until `drop`, or until its request is collected: a signal handler's exception may end a call
        before it returns that request."""
        renew_at = time.monotonic() + lasts_s / _RENEWALS
        self.renew_at = min(self.renew_at, renew_at) if self.held else renew_at
        self.held[token] = lasts_s, weakref.ref(asked)

    def drop(self, token: int) -> bool:
        """Stops renewing a claim that was committed or abandoned. Returns False if it was not held any more."""
        return self.held.pop(token, None) is not None

    def give_back(self, token: int, timeout_s: float, error: TensordError | None = None) -> None:
        """Abandons a claim without a payload. `error`: why the value was not stored. Call it where no signal handler
        can interrupt it."""
        if self.drop(token):
            # An unsent Abandon does no harm: the claim ends with the connection, or expires.
            with suppress(TensordError):
                self._link.send(abandon(token, error), timeout_s=timeout_s, connected=self._link.attached)

    def give_back_forgotten(self, timeout_s: float) -> None:
        """Gives back each claim whose request was collected."""
        for token, (_, asked) in list(self.held.items()):
            if asked() is None:
                self.give_back(token, timeout_s)

    def renew(self, channel: BlockingChannel, timeout_s: float) -> None:
        """Renews all claims on the connection that they were granted on."""
        tokens = list(self.held)
        for start in range(0, len(tokens), TOKENS_MAX):
            channel.send(messages.Renew(tokens[start : start + TOKENS_MAX]), timeout_s=timeout_s)
        # Another thread may have dropped the last claim; then `renew_at` has no meaning.
        shortest_s = min((lasts_s for lasts_s, _ in list(self.held.values())), default=1.0)
        self.renew_at = time.monotonic() + shortest_s / _RENEWALS


def abandon(token: int, error: BaseException | None) -> messages.Abandon:
    """The message that gives a claim up. `error`: why the value was not stored; None if no value was computed."""
    never = isinstance(error, CANNOT_BE_STORED)
    return messages.Abandon(token, messages.ErrorBody.of(error) if error is not None and never else None)


class PushListener(Protocol):
    """Receives the messages that the daemon sends unasked. The link's thread calls it, so it must not block."""

    def attached(self, connected: Connected) -> None:
        """A new connection: the daemon has no state of this client, so the listener sends its registrations again."""

    def detached(self) -> None:
        """The connection ended. Also called when the client is closed, then in the closing thread."""

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        """A push, or an answer with the state of modes, in the order in which the daemon sent them."""

    def forked(self) -> None:
        """Called in the child of a fork. Registrations belong to the parent; locks and threads are gone."""


class Listeners:
    """The listeners of one client, by weak reference. `connection` returns the current connection, or None."""

    def __init__(self, connection: Callable[[], Connected | None]) -> None:
        self._connection = connection
        self._references: list[weakref.ref[PushListener]] = []

    def add(self, listener: PushListener) -> None:
        """Adds a listener. If the client is attached, calls `listener.attached` at once."""
        # SYNC POINT: added before the connection is read. The link's thread sets that before it tells all.
        self._references.append(weakref.ref(listener, self._references.remove))
        if (connected := self._connection()) is not None:
            listener.attached(connected)

    def remove(self, listener: PushListener) -> None:
        """Removes a listener."""
        with suppress(ValueError):
            self._references.remove(weakref.ref(listener))

    def tell(self, call: Callable[[PushListener], None]) -> None:
        """Calls `call` with each listener."""
        for listener in self.alive():
            try:
                call(listener)
            except Exception:
                # An exception of a listener must not end the connection, which serves puts and claims too.
                _log.exception("%s failed to handle a message; the connection stays", type(listener).__name__)

    def alive(self) -> list[PushListener]:
        """All of them."""
        return [listener for each in list(self._references) if (listener := each()) is not None]
