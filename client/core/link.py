"""The client's connection: one background thread that attaches, receives, renews claims, and attaches again.

Owns: the socket, requests that wait for an answer, which View is in force, and who listens. Does not own what is read
through it (lookups never come here, and go on while the daemon is away), nor what a push means: listeners are told.
"""

from __future__ import annotations

import logging
import os
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
from .puts import WENT, PutSender
from .sweep import sweep_now_and_then
from .view import View
from .waiting import LockEvent, LockFuture

SAY_S: Final = 1.0
"""How long sending one message to the daemon may take, where nobody waits for the answer."""
_RETRY_FIRST_S: Final = 0.02
_RETRY_MOST_S: Final = 1.0
_RETRY_WAITED_S: Final = 0.05
"""While puts wait to be sent again: a daemon that is killed again and again may live for less than a second."""
_IDLE_S: Final = 1.0
_SEND_S: Final = 5.0
# A claim is renewed three times in the time it lasts.
_RENEWALS: Final = 3
_log = logging.getLogger("tensord")

Connected = BlockingChannel
"""Names one connection to one daemon: what was said on it is nothing to the next."""
Push = messages.ModeChanged | messages.Order
Told = Push | messages.Modes | messages.DeviceOpened


class PushListener(Protocol):
    """Who hears what the daemon says by itself. Called in the link's thread, which must not be kept waiting."""

    def attached(self, connected: Connected) -> None:
        """There is a daemon that knows nothing of this client yet: whatever it should know is said again."""

    def detached(self) -> None:
        """The daemon went away. Also when the client is closed, then in the closing thread."""

    def told(self, message: Told, connected: Connected) -> None:
        """A push, or the state of modes as an answer has it, in the order of the daemon's words."""

    def forked(self) -> None:
        """In the child of a fork: whatever was told to the daemon is the parent's, locks and threads are gone."""


class PendingRequest(LockFuture):
    """A request that waits for its answer. `waits`: the daemon has said that it is another's, who computes, to come;
    `expected_at` (monotonic): when that one expects to have stored it, 0 where it did not tell."""

    waits = False
    expected_at = 0.0


class Link:
    """One connection to the daemon at `path`, kept up for as long as the client lives.

    `view` is what lookups go through; None before the first attachment, and after a fork until the next one.
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
        # Replaced, never changed, so that nobody needs a lock to go through them.
        self._listeners: tuple[weakref.ref[PushListener], ...] = ()
        self._reset()

    def _reset(self) -> None:
        """What does not outlive a fork: the thread, the socket, the locks, and all that is under way."""
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
        """Starts the thread, if it does not run, and waits until it has attached or failed to; for `wait_s`, or as long
        as attaching may take. Who came too late for one attempt does not wait for it again.
        """
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
        """Ends the connection. Views of leases stay, and their pins with them."""
        self._stopping.set()
        channel, thread = self._channel, self._thread
        if channel is not None:
            channel.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._attach_timeout_s)
        self.puts.close()
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
        """Waits until attached; False if that did not happen in time."""
        self.start()
        return self._attached.wait(timeout_s)

    @property
    def connection(self) -> Connected | None:
        """The connection that there is now."""
        return self._channel if self._attached.is_set() else None

    @property
    def closed(self) -> bool:
        """Whether `close` was called: there will be no other connection."""
        return self._stopping.is_set()

    def listen(self, listener: PushListener) -> None:
        """Tells `listener`, for as long as somebody else holds it. If there is a daemon, it is attached at once."""
        with self._lock:
            kept = tuple(ref for ref in self._listeners if ref() not in (None, listener))
            self._listeners = (*kept, weakref.ref(listener))
            connected = self.connection
        if connected is not None:
            listener.attached(connected)

    def listeners(self) -> list[PushListener]:
        """Who listens now."""
        return [listener for ref in self._listeners if (listener := ref()) is not None]

    def unlisten(self, listener: PushListener) -> None:
        """Tells it no more."""
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
        """Sends messages that need no answer here; with `connected` on that connection, or not at all.

        Raises:
            DaemonUnavailable, TimedOut: they did not go.
        """
        channel = self._channel
        if channel is None or not self._attached.is_set() or channel is not (connected or channel):
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
        """Sends the request that `make` makes for an id, and gives the future of its answer.

        The future fails with the error the daemon answers, or DaemonUnavailable. `then` is called with it when it is
        settled, by the link's thread in the order of the answers; where it was not sent, at once.
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
            # Unless the connection's end has settled it already.
            if self._answers.pop(number, None) is not None:
                # Its traceback has this frame, which has the future: a cycle that would keep the callers' views.
                answer.set_exception(error.with_traceback(None))
        return answer

    def answer(self, future: Future[Any], timeout_s: float) -> Any:
        """Waits for an answer.

        Raises:
            TimedOut: none came in time.
        """
        try:
            return future.result(max(0.0, timeout_s))
        except TimeoutError:
            if not future.cancel():
                # It came in this very moment, and may hold something that somebody has to give back.
                return future.result()
            raise TimedOut(f"the daemon at {self.path} did not answer within {timeout_s:.3g} s") from None
        except BaseException:
            # Nobody wants it any more, if it is still to come; the daemon's own errors are settled already.
            future.cancel()
            raise
        finally:
            # For the same reason as in `ask`.
            del future

    def hold_claim(self, token: int, lasts_s: float, asked: PendingRequest) -> None:
        """Renews a claim until `drop_claim`, or until nobody has the request any more that it was granted to: a signal
        handler's exception may have ended a call before it gave that to anybody.
        """
        renew_at = time.monotonic() + lasts_s / _RENEWALS
        self._renew_at = min(self._renew_at, renew_at) if self._claims else renew_at
        self._claims[token] = lasts_s, weakref.ref(asked)

    def drop_claim(self, token: int) -> bool:
        """The claim was committed or abandoned; False if it was not held (any more)."""
        return self._claims.pop(token, None) is not None

    def give_back(self, token: int, timeout_s: float = _SEND_S) -> None:
        """Ends a claim that nothing came of: the first who waits is asked to compute."""
        aside(partial(self._give_back, token, timeout_s))

    def _give_back(self, token: int, timeout_s: float) -> None:
        if self.drop_claim(token):
            # Unsent, it has ended with the connection, or will by itself.
            with suppress(TensordError):
                self.send(messages.Abandon(token), timeout_s=timeout_s)

    def holds_claim(self, token: int) -> bool:
        """Whether the claim is renewed: from its grant until `drop_claim`, or until the daemon went away."""
        return token in self._claims

    def refusal(self, key: bytes) -> TensordError | None:
        """Why the daemon would store nothing under a key, as far as shared memory tells."""
        view = self.view
        return view.refusal(key) if view is not None else None

    def unavailable(self) -> TensordError:
        """Why there is no daemon. A new error for each caller: one that is raised again keeps the frames of all its
        callers, and the payloads and views in them, until the daemon is back.
        """
        if self.error is None:
            return DaemonUnavailable(f"not attached to the daemon at {self.path}")
        return copy(self.error)

    # ---- forks

    def before_fork(self) -> None:
        """In the forking process, just before, with the lanes in use frozen."""
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
            self.puts.why_lost = "this process forked while it held views, and attaches anew: put it again"
            channel.close()

    def after_fork_in_child(self) -> None:
        """The child begins as if it had never attached; inherited views keep what they stand on."""
        if self._channel is not None:
            self._channel.close_in_child()
        lane_fd, self._lane_fd = self._lane_fd, -1
        if lane_fd >= 0:
            os.close(lane_fd)
        self.view = None
        self.puts.close_in_child()
        closed = self._stopping.is_set()
        self._reset()
        if closed:
            self._stopping.set()
        self._tell(lambda listener: listener.forked())

    def _shut(self) -> None:
        """Has the thread attach anew."""
        channel = self._channel
        if channel is not None:
            channel.shut()

    # ---- the thread

    def _run(self) -> None:
        retry_s = _RETRY_FIRST_S
        while not self._stopping.is_set():
            if self.puts.cut:
                self.puts.disconnected()
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
                if self.puts.cut:
                    # While there was no channel to end. Later ones end this one.
                    self.puts.disconnected()
                # Before anybody else may send: a Commit that overtook the inbox would be refused.
                self.puts.send_again(partial(_send_on, channel), channel)
                self.puts.why_lost = WENT
                with self._lock:
                    # Whoever begins to listen now is attached either here, or there.
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
                # Who was turned away finds out by reading why.
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
        self.limits = self.puts.limits = welcome.limits
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
                    raise DaemonUnavailable("this process forked meanwhile, and gave up the lane that came back")
                if before.is_over(index_fd):
                    # The same memory and our own lane again: what is mapped stays, and so does every lease.
                    if not before.is_whole:
                        self.view = View.open(ring_fd, index_fd, before.lane)
                    return
            lane = Lane(lane_fd)
            # Before anything can be pinned in it.
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
        while not self._stopping.is_set() and not self.puts.cut:
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
        if isinstance(message, Told):
            self._tell(lambda listener: listener.told(message, channel))
        match message:
            case messages.ModeChanged() | messages.Order():
                pass
            case messages.PartCopied() | messages.Committed():
                self.puts.acknowledged(message)
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
                    self.puts.refused(number, message.to_error())
            case messages.Error():
                raise message.to_error()
            case messages.Claimed(answer="compute", token=token):
                # Before its holder hears of it: this thread is about to wait, and must know when to renew it.
                answer = self._answers.pop(message.id, None)
                if answer is not None:
                    self.hold_claim(token, message.lasts_s, answer)
                if answer is None or not _settle(answer, message):
                    # Whoever asked has stopped waiting; the claim must not keep others waiting.
                    self.drop_claim(token)
                    self.send(messages.Abandon(token))
            case messages.Reserved(reservation=number):
                answer = self._answers.pop(message.id, None)
                if answer is None or not _settle(answer, message):
                    # Whoever asked has stopped waiting; the memory must not be kept from others.
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
        self._fail_answers(self.error or DaemonUnavailable(f"the daemon at {self.path} went away"))
        self._tell(lambda listener: listener.detached())
        self.puts.disconnected()

    def _tell(self, say: Callable[[PushListener], None]) -> None:
        for listener in self.listeners():
            try:
                say(listener)
            except Exception:
                # A listener's fault must not end the connection that puts and claims go over.
                _log.exception("%s failed to take in what the daemon said", type(listener).__name__)

    def _fail_answers(self, error: TensordError) -> None:
        while self._answers:
            with suppress(KeyError):
                # One each: whoever waits raises it, with a traceback of its own.
                _settle(self._answers.popitem()[1], error=copy(error))


def _send_on(
    channel: BlockingChannel, *sent: messages.Message, fds: Sequence[int] = (), connected: object = None
) -> None:
    """`Link.send` on a channel that is not attached yet."""
    channel.send(*sent, fds=fds, timeout_s=_SEND_S)


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> bool:
    """Gives a future its outcome; False if nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return False
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
    return True
