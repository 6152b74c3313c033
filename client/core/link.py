"""The client's connection: one background thread that attaches, receives messages, renews claims, and reconnects.

Owns: the socket, requests that wait for an answer, the current View, the claims that are renewed, and the listeners.
Does not own: lookups, which read the View and go on while the daemon is away; nor the effects of a push, which the
listeners decide.
Invariants: an answer settles its request once. A claim or a reservation that is granted to a cancelled request is given
back at once.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from ...errors import DaemonUnavailable, TensordError, TimedOut
from ...ipc import messages
from ...ipc.blocking import BlockingChannel
from ...ipc.schema import PROTOCOL_VERSION, TOKENS_MAX, ClientLimits
from ...shm import fence
from ...shm.lanes import Lane
from . import forks
from .aside import aside
from .in_flight import WENT
from .puts import PutSender
from .sweep import sweep_now_and_then
from .view import View
from .waiting import LockEvent, LockFuture

SAY_S: Final = 1.0
"""Time limit for sending one message, in seconds, where no call waits for its answer."""
_RETRY_FIRST_S: Final = 0.02
_RETRY_MOST_S: Final = 1.0
_RETRY_WAITED_S: Final = 0.05
"""Longest pause between attempts to attach while puts wait to be sent again: a daemon that is killed repeatedly may
live for less than a second.
"""
_IDLE_S: Final = 1.0
_SEND_S: Final = 5.0
# A claim is renewed three times within its lifetime.
_RENEWALS: Final = 3
_log = logging.getLogger("tensord")

Connected = BlockingChannel
"""Identifies one connection. The daemon keeps no state of it for the next."""
Push = messages.ModeChanged | messages.Order
ListenerMessage = Push | messages.Modes | messages.DeviceOpened


class PushListener(Protocol):
    """Receives the messages that the daemon sends unasked. The link's thread calls it, so it must not block."""

    def attached(self, connected: Connected) -> None:
        """A new connection: the daemon has no state of this client, so the listener sends its registrations again."""

    def detached(self) -> None:
        """The connection ended. Also called when the client is closed, then in the closing thread."""

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        """A push, or an answer with the state of modes, in the order in which the daemon sent them."""

    def forked(self) -> None:
        """Called in the child of a fork. Registrations at the daemon belong to the parent; locks and
        threads are gone.
        """


class PendingRequest(LockFuture):
    """A request that waits for its answer.

    `waits`: true once the daemon answered "wait": another client computes the key, and a second answer follows.
    `expected_at`: when that client expects to have stored the key, by time.monotonic; 0 if unknown.
    """

    waits = False
    expected_at = 0.0


class Link:
    """One connection to the daemon at `path`, renewed for as long as the client lives.

    `view` serves the lookups. None before the first attachment, and after a fork until the next one.
    """

    def __init__(self, path: Path, name: str, attach_timeout_s: float) -> None:
        self.path = path
        self.name = name
        self.view: View | None = None
        self.limits = ClientLimits()
        self.epoch = 0
        self.instance = ""
        self.version = ""
        self.error: TensordError | None = None
        self._attach_timeout_s = attach_timeout_s
        self._ids = count(1)
        # Copy-on-write, so that readers need no lock.
        self._listeners: tuple[weakref.ref[PushListener], ...] = ()
        self._reset()

    def _reset(self) -> None:
        """Creates the state that does not survive a fork: the thread, the socket, the locks, and all puts and requests
        in flight.
        """
        self.puts = PutSender(self.send, self.next_id, lambda: self.connection, self.refusal, self._shut)
        self._channel: BlockingChannel | None = None
        self._lane_fd = -1
        self._lane_given_up = False
        self._lock = threading.Lock()
        self._answers: dict[int, PendingRequest] = {}
        self._claims: dict[int, tuple[float, weakref.ref[PendingRequest]]] = {}
        self._renew_at = 0.0
        self._thread: threading.Thread | None = None
        self._attached = LockEvent()
        self._tried = LockEvent()
        self._stopping = LockEvent()

    # ---- for callers

    def start(self, wait_s: float | None = None) -> None:
        """Starts the thread if it does not run, and waits until it has attached or failed to: for `wait_s` seconds, or
        for the time limit of an attempt. After a timeout, later calls do not wait for the same attempt again. While the
        interpreter ends, no thread runs, so nothing is waited for.
        """
        if sys.is_finalizing():
            return
        if self._thread is None:
            aside(self._start)
        if not self._tried.wait(self._attach_timeout_s if wait_s is None else wait_s):
            self._tried.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._tried.clear()
                self._thread = threading.Thread(target=self._run, name="tensord-link", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the connection. Views of leases stay valid, and their pins stay. While the interpreter ends, nothing is
        done: the connection ends with the process."""
        if sys.is_finalizing():
            return
        self._stopping.set()
        channel, thread = self._channel, self._thread
        if channel is not None:
            channel.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._attach_timeout_s)
        self.puts.in_flight.close()
        self._fail_answers(DaemonUnavailable("the client was closed"))
        self._tell(lambda listener: listener.detached())
        self.view = None
        if self._lane_fd >= 0:
            os.close(self._lane_fd)
            self._lane_fd = -1

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now."""
        return self._attached.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits until attached; returns False if that takes longer than `timeout_s` seconds."""
        self.start()
        return self._attached.wait(timeout_s)

    @property
    def connection(self) -> Connected | None:
        """The current connection. None while not attached, and while the interpreter ends, since no thread receives
        answers then."""
        return self._channel if self._attached.is_set() and not sys.is_finalizing() else None

    @property
    def closed(self) -> bool:
        """Whether `close` was called. No connection follows."""
        return self._stopping.is_set()

    def listen(self, listener: PushListener) -> None:
        """Adds a listener, by weak reference. If the client is attached, calls `listener.attached` at once."""
        with self._lock:
            kept = tuple(ref for ref in self._listeners if ref() not in (None, listener))
            self._listeners = (*kept, weakref.ref(listener))
            connected = self.connection
        if connected is not None:
            listener.attached(connected)

    def listeners(self) -> list[PushListener]:
        """The listeners that are still alive."""
        return [listener for ref in self._listeners if (listener := ref()) is not None]

    def unlisten(self, listener: PushListener) -> None:
        """Removes a listener."""
        with self._lock:
            self._listeners = tuple(ref for ref in self._listeners if ref() not in (None, listener))

    def next_id(self) -> int:
        return next(self._ids)

    def send(
        self,
        *sent: messages.Message,
        fds: Sequence[int] = (),
        timeout_s: float = _SEND_S,
        connected: Connected | None = None,
    ) -> None:
        """Sends messages whose answers this client does not wait for. With `connected`, sends on that connection or not
        at all.

        Raises:
            DaemonUnavailable, TimedOut: the messages were not sent.
        """
        channel = self._channel
        if channel is None or channel is not self.connection or channel is not (connected or channel):
            raise self.unavailable()
        channel.send(*sent, fds=fds, timeout_s=timeout_s)

    def ask(
        self,
        make: Callable[[int], messages.Message],
        timeout_s: float,
        *,
        connected: Connected | None = None,
        then: Callable[[Future[Any]], None] | None = None,
    ) -> PendingRequest:
        """Sends a request, and returns the future of its answer. `make` builds the request from its id.

        The future fails with the daemon's error, or with DaemonUnavailable. `then` is called with the settled future:
        by the link's thread in the order of the answers, or at once if the request was not sent.
        """
        return aside(partial(self._ask, make, timeout_s, connected, then))

    def _ask(
        self,
        make: Callable[[int], messages.Message],
        timeout_s: float,
        connected: Connected | None,
        then: Callable[[Future[Any]], None] | None,
    ) -> PendingRequest:
        number = self.next_id()
        answer = PendingRequest()
        if then is not None:
            answer.add_done_callback(then)
        self._answers[number] = answer
        try:
            self.send(make(number), timeout_s=timeout_s, connected=connected)
        except TensordError as error:
            # The end of the connection may have settled it before.
            if self._answers.pop(number, None) is not None:
                # The traceback refers to this frame, and the frame to the future: a cycle that would keep the callers'
                # views alive.
                answer.set_exception(error.with_traceback(None))
        return answer

    def answer(self, future: Future[Any], timeout_s: float) -> Any:
        """Waits for an answer, and returns it.

        Raises:
            TimedOut: no answer within `timeout_s` seconds; the request is cancelled.
            TensordError: the daemon's error, or DaemonUnavailable.
        """
        try:
            return future.result(max(0.0, timeout_s))
        except TimeoutError:
            if not future.cancel():
                # The answer arrived in this moment. It may be a grant that the caller has to give back.
                return future.result()
            raise TimedOut(f"the daemon at {self.path} did not answer within {timeout_s:.3g} s") from None
        except BaseException:
            # Cancels the request if no answer has come; the daemon's own errors have settled it already.
            future.cancel()
            raise
        finally:
            # Breaks the cycle described in `_ask`.
            del future

    def hold_claim(self, token: int, lasts_s: float, asked: PendingRequest) -> None:
        """Renews a claim until `drop_claim`, or until the request that it was granted to is collected. A signal
        handler's exception may end a call before it returns that request.
        """
        renew_at = time.monotonic() + lasts_s / _RENEWALS
        self._renew_at = min(self._renew_at, renew_at) if self._claims else renew_at
        self._claims[token] = lasts_s, weakref.ref(asked)

    def drop_claim(self, token: int) -> bool:
        """Stops renewing a claim that was committed or abandoned. Returns False if it was not held any more."""
        return self._claims.pop(token, None) is not None

    def give_back(self, token: int, timeout_s: float = _SEND_S) -> None:
        """Abandons a claim without a payload. The daemon grants the key to the first waiting client."""
        aside(partial(self._give_back, token, timeout_s))

    def _give_back(self, token: int, timeout_s: float) -> None:
        if self.drop_claim(token):
            # An unsent Abandon does no harm: the claim ends with the connection, or expires.
            with suppress(TensordError):
                self.send(messages.Abandon(token), timeout_s=timeout_s)

    def holds_claim(self, token: int) -> bool:
        """Whether the claim is renewed: from its grant until `drop_claim`, or until the connection ends."""
        return token in self._claims

    def refusal(self, key: bytes) -> TensordError | None:
        """Why the daemon would refuse a put of `key`, as far as shared memory shows; None if it would not."""
        view = self.view
        return view.refusal(key) if view is not None else None

    def unavailable(self) -> TensordError:
        """Why there is no daemon, as a new error for each caller. A shared error would keep the frames of all its
        callers, with their payloads and views, until the daemon is back.
        """
        if self.error is None:
            return DaemonUnavailable(f"not attached to the daemon at {self.path}")
        return copy(self.error)

    # ---- forks

    def before_fork(self) -> None:
        """Called in the forking process, just before the fork, after the lanes in use were frozen."""
        if self.view is not None and self.view.lane.frozen:
            self.view = None
            self._lane_given_up = True

    def after_fork_in_parent(self) -> None:
        """Attaches anew if the lane was given up."""
        if not self._lane_given_up:
            return
        self._lane_given_up = False
        channel = self._channel
        if channel is not None:
            self._tried.clear()
            self.puts.in_flight.why_lost = "this process forked while it held views, and attaches anew; put it again"
            channel.close()

    def after_fork_in_child(self) -> None:
        """The child starts without an attachment. Inherited views keep their mappings."""
        if self._channel is not None:
            self._channel.close_in_child()
        lane_fd, self._lane_fd = self._lane_fd, -1
        if lane_fd >= 0:
            os.close(lane_fd)
        self.view = None
        self.puts.in_flight.close_in_child()
        closed = self._stopping.is_set()
        self._reset()
        if closed:
            self._stopping.set()
        self._tell(lambda listener: listener.forked())

    def _shut(self) -> None:
        """Ends the connection, so that the thread attaches anew."""
        channel = self._channel
        if channel is not None:
            channel.shut()

    # ---- the thread

    def _run(self) -> None:
        retry_s = _RETRY_FIRST_S
        while not self._stopping.is_set():
            if self.puts.in_flight.cut:
                self.puts.in_flight.disconnected()
            try:
                channel = self._attach()
            except (TensordError, OSError) as error:
                self.error = error if isinstance(error, TensordError) else DaemonUnavailable(str(error))
                self._tried.set()
                self._stopping.wait(min(retry_s, _RETRY_WAITED_S) if self.puts.in_flight else retry_s)
                sweep_now_and_then()
                retry_s = min(retry_s * 2, _RETRY_MOST_S)
                continue
            retry_s = _RETRY_FIRST_S
            try:
                if self.puts.in_flight.cut:
                    # A put was interrupted while there was no channel. With a channel, the interruption ends the
                    # channel.
                    self.puts.in_flight.disconnected()
                # Before other threads may send: a Commit that came before its inbox would be refused.
                self.puts.in_flight.send_again(partial(_send_on, channel), channel)
                self.puts.in_flight.why_lost = WENT
                with self._lock:
                    # Under the lock of `listen`: a new listener is told of the connection either there or in `_serve`.
                    self._attached.set()
                self._serve(channel)
            except TensordError as error:
                self.error = error
            finally:
                self._tried.set()
                self._detach(channel)

    def _serve(self, channel: BlockingChannel) -> None:
        self._tell(lambda listener: listener.attached(channel))
        self._tried.set()
        self._receive(channel)

    def _attach(self) -> BlockingChannel:
        deadline = time.monotonic() + self._attach_timeout_s
        fenced = fence.register()
        channel = BlockingChannel.connect(self.path, self._attach_timeout_s)
        self._channel = channel
        try:
            hello = messages.Hello(self.next_id(), PROTOCOL_VERSION, self.name, os.getpid(), fenced)
            with suppress(DaemonUnavailable):
                # If the daemon has closed the connection, the error that it sent is read below.
                channel.send(hello, timeout_s=self._attach_timeout_s)
            welcome, _ = self._expect(channel, messages.Welcome, deadline)
            view = self.view
            brought = (self._lane_fd,) if self._lane_fd >= 0 and view is not None else ()
            attach = messages.Attach(self.next_id(), len(brought))
            channel.send(attach, fds=brought, timeout_s=self._attach_timeout_s)
            attached, fds = self._expect(channel, messages.Attached, deadline)
            self._take_memory(attached, fds, view)
        except BaseException:
            self._channel = None
            channel.close()
            raise
        self.limits = self.puts.inboxes.limits = welcome.limits
        self.epoch = welcome.epoch
        self.instance, self.version = welcome.instance, welcome.version
        self.error = None
        return channel

    def _expect(self, channel: BlockingChannel, kind: type[Any], deadline: float) -> tuple[Any, tuple[int, ...]]:
        message, fds = channel.receive(max(0.0, deadline - time.monotonic()))
        if isinstance(message, kind):
            return message, fds
        for fd in fds:
            os.close(fd)
        if isinstance(message, messages.Error):
            raise message.to_error()
        raise DaemonUnavailable(f"the daemon answered {type(message).__name__}, expected {kind.__name__}")

    def _take_memory(self, attached: messages.Attached, fds: Sequence[int], before: View | None) -> None:
        ring_fd, index_fd, lane_fd = fds
        try:
            if before is not None and before.lane.lane_id == attached.lane_id:
                if self.view is not before:
                    raise DaemonUnavailable("this process forked while it attached, and gave up its lane")
                if before.is_over(index_fd):
                    # The daemon returned the same memory and this client's own lane: the mappings and all leases stay.
                    if not before.is_whole:
                        self.view = View.open(ring_fd, index_fd, before.lane)
                    return
            lane = Lane(lane_fd)
            # Before the first pin in it.
            forks.keep(lane)
            self.view = View.open(ring_fd, index_fd, lane)
            if self._lane_fd >= 0:
                os.close(self._lane_fd)
            self._lane_fd, lane_fd = lane_fd, -1
        finally:
            for fd in (ring_fd, index_fd, lane_fd):
                if fd >= 0:
                    os.close(fd)

    def _receive(self, channel: BlockingChannel) -> None:
        while not self._stopping.is_set() and not self.puts.in_flight.cut:
            self.puts.inboxes.tidy()
            sweep_now_and_then()
            wait_s = _IDLE_S
            if self._claims:
                self._give_back_forgotten()
                wait_s = min(wait_s, max(0.0, self._renew_at - time.monotonic()))
            with suppress(TimedOut):
                message, _ = channel.receive(wait_s)
                self._take(message, channel)
            if self._claims and time.monotonic() >= self._renew_at:
                tokens = list(self._claims)
                for start in range(0, len(tokens), TOKENS_MAX):
                    channel.send(messages.Renew(tokens[start : start + TOKENS_MAX]), timeout_s=_SEND_S)
                shortest_s = min((lasts_s for lasts_s, _ in list(self._claims.values())), default=_IDLE_S)
                self._renew_at = time.monotonic() + shortest_s / _RENEWALS

    def _give_back_forgotten(self) -> None:
        for token, (_, asked) in list(self._claims.items()):
            if asked() is None:
                self._give_back(token, SAY_S)

    def _take(self, message: Any, channel: BlockingChannel) -> None:
        if isinstance(message, ListenerMessage):
            self._tell(lambda listener: listener.received(message, channel))
        match message:
            case messages.ModeChanged() | messages.Order():
                pass
            case messages.PartCopied() | messages.Committed():
                self.puts.in_flight.acknowledged(message)
            case messages.Claimed(answer="wait"):
                waiting = self._answers.get(message.id)
                if waiting is not None:
                    waiting.expected_at = time.monotonic() + message.lasts_s if message.lasts_s else 0.0
                    waiting.waits = True
            case messages.Error(id=int(number)):
                answer = self._answers.pop(number, None)
                if answer is not None:
                    _settle(answer, error=message.to_error())
                else:
                    self.puts.in_flight.refused(number, message.to_error())
            case messages.Error():
                raise message.to_error()
            case messages.Claimed(answer="compute", token=token):
                # Before the future is settled: this thread is about to wait, and must know when to renew the claim.
                answer = self._answers.pop(message.id, None)
                if answer is not None:
                    self.hold_claim(token, message.lasts_s, answer)
                if answer is None or not _settle(answer, message):
                    # The caller has stopped waiting. Give the claim back, so that no client waits for it.
                    self.drop_claim(token)
                    self.send(messages.Abandon(token))
            case messages.Reserved(reservation=number):
                answer = self._answers.pop(message.id, None)
                if answer is None or not _settle(answer, message):
                    # The caller has stopped waiting. Release the memory for other processes.
                    self.send(messages.ReleaseReservation(self.next_id(), number))
            case _:
                answer = self._answers.pop(message.id, None)
                if answer is not None:
                    _settle(answer, message)
                else:
                    self.puts.inboxes.opened(message.id)

    def _detach(self, channel: BlockingChannel) -> None:
        self._attached.clear()
        self._channel = None
        channel.close()
        self._claims.clear()
        self._fail_answers(self.error or DaemonUnavailable(f"the connection to the daemon at {self.path} ended"))
        self._tell(lambda listener: listener.detached())
        self.puts.in_flight.disconnected()

    def _tell(self, call: Callable[[PushListener], None]) -> None:
        for listener in self.listeners():
            try:
                call(listener)
            except Exception:
                # An exception of a listener must not end the connection, which serves puts and claims too.
                _log.exception("%s failed to handle a message; the connection stays", type(listener).__name__)

    def _fail_answers(self, error: TensordError) -> None:
        while self._answers:
            with suppress(KeyError):
                # A copy for each caller, which raises it with a traceback of its own.
                _settle(self._answers.popitem()[1], error=copy(error))


def _send_on(
    channel: BlockingChannel, *sent: messages.Message, fds: Sequence[int] = (), connected: object = None
) -> None:
    """`Link.send` on a channel that is not attached yet."""
    channel.send(*sent, fds=fds, timeout_s=_SEND_S)


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> bool:
    """Settles a future. Returns False if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return False
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
    return True
