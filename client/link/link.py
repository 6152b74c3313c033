"""The client's connection: one background thread that attaches, receives messages, renews claims, and reconnects.

Owns: the thread, and the current View. Does not own: waiting for a connection, and whether the daemon answers
(absence.py), requests, messages, claims and listeners (answers.py), puts (writing/puts.py); nor lookups, which read the
View and go on while the daemon is away.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from tensord import __version__

from ...errors import DaemonUnavailable, ProcessLimit, TensordError, TimedOut, without_frames
from ...ipc.messages import control as messages
from ...ipc.messages.schema import PROTOCOL_VERSION, ClientLimits
from ...ipc.wire.blocking import BlockingChannel
from ...shm.lanes import fence
from ...shm.lanes.lane import Lane
from ...shm.ring.segments import ring_not_mapped
from ..reading.sweep import sweep_now_and_then
from ..reading.view import View
from ..threads import forks
from ..threads.aside import aside, begin
from ..threads.waiting import LockEvent
from ..writing.puts import Puts
from .absence import PROMPT, Attachment, EndedHere, Silence, absence, attach_limit_s, no_answer
from .answers import SAY_S as SAY_S
from .answers import Answers, HeldClaims, Listeners
from .answers import Connected as Connected

_RETRY_FIRST_S: Final = 0.02
_RETRY_MOST_S: Final = 1.0
_IDLE_S: Final = 1.0
_SEND_S: Final = 5.0


class Link:
    """One connection to the daemon at `path`, renewed for as long as the client lives.

    `view` serves the lookups. None before the first attachment, and after a fork until the next one. `owner` returns
    the client. Once that is collected, the thread ends by itself.
    """

    def __init__(self, path: Path, name: str, attach_timeout_s: float, *, required: bool = False) -> None:
        self.path = path
        self._required = required
        self.name = name
        self.view: View | None = None
        self.limits = ClientLimits()
        self.epoch = 0
        self.instance = self.version = ""
        self.remote = False
        self.error: TensordError | None = None
        self.owner: Callable[[], object | None] = lambda: True
        self._attach_timeout_s = attach_timeout_s
        self.next_id: Callable[[], int] = partial(next, count(1))
        self.listeners = Listeners(lambda: self.attached)
        self._reset()

    def _reset(self) -> None:
        """Creates the state that no fork keeps: the thread, the socket, the locks, all puts and requests in flight."""
        self.silence = Silence(self.path, self._answers_or_not)
        self.attachment = Attachment()
        self.puts = Puts(self)
        self._lane_fd = -1
        self._lane_given_up = False
        self._lock = threading.Lock()
        self.answers = Answers(self)
        self.ask = self.answers.ask
        self.claims = HeldClaims(self)
        self._thread: threading.Thread | None = None
        self._stopping = LockEvent()

    # ---- for callers

    def start(self, wait_s: float | None = None) -> None:
        """Starts the thread if it does not run, and waits until it has attached or failed to: for `wait_s` seconds, or
        for the time limit of an attempt, but not for long beside a daemon that is known not to answer. Later calls do
        not wait for the same attempt again. Does nothing after `close`, nor while the interpreter ends."""
        if sys.is_finalizing() or self._stopping.is_set():
            return
        if self._thread is None:
            aside(self._start)
        limit_s = attach_limit_s(self.path, self._attach_timeout_s) if wait_s is None else wait_s
        if not self.attachment.wait_for(lambda: self.attachment.settled, limit_s):
            self.attachment.settle()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self.attachment.settled = False
                thread = threading.Thread(target=self._run, name="tensord-link", daemon=True)
                try:
                    begin(thread)
                    self._thread = thread
                except ProcessLimit as error:
                    # As without a daemon. The next call tries again.
                    self.error = without_frames(error)
                    self.attachment.settle()

    def close(self) -> None:
        """Ends the connection. Views and their pins stay. Does nothing while the interpreter ends: the connection ends
        with the process."""
        if sys.is_finalizing():
            return
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._attach_timeout_s)
        if thread is None or thread.is_alive():
            self._finish()

    def end(self) -> None:
        """Begins the end of the connection; the thread does the rest. Waits for nothing."""
        self._stopping.set()
        self.attachment.end()

    def _finish(self) -> None:
        self.puts.ended(DaemonUnavailable("the client was closed before the daemon answered"))
        self.answers.fail_all(DaemonUnavailable("the client was closed"))
        self.listeners.tell(lambda listener: listener.detached())
        self.view = None
        if self._thread in (None, threading.current_thread()):
            self._replace_lane_fd(-1)

    @property
    def connected(self) -> bool:
        """Whether the daemon is there now."""
        return self.connection is not None

    def wait_connected(self, timeout_s: float) -> bool:
        """As `Client.wait_connected`; False after `close`."""
        self.start()
        self.attachment.wait_for(lambda: self.connected or self.closed or sys.is_finalizing(), timeout_s)
        return self.connected and not self.closed

    @property
    def connection(self) -> Connected | None:
        """The current connection. None while not attached, while the daemon does not answer, and while the interpreter
        ends."""
        return None if self.silence.away else self.attachment.current

    @property
    def attached(self) -> Connected | None:
        """As `connection`, also while the daemon does not answer: for what it is to know once it does."""
        return self.attachment.current

    @property
    def closed(self) -> bool:
        """Whether `close` was called. No connection follows."""
        return self._stopping.is_set()

    def send(
        self,
        *sent: messages.Message,
        fds: Sequence[int] = (),
        timeout_s: float = _SEND_S,
        connected: Connected | None = None,
    ) -> None:
        """Sends messages whose answers this client does not wait for. With `connected`, sends on that connection or not
        at all, also while the daemon does not answer. Raises DaemonUnavailable or TimedOut if they were not sent."""
        channel = self.connection if connected is None else self.attached
        if channel is None or channel is not (connected or channel):
            raise self.unavailable()
        if isinstance(sent[0], PROMPT):
            self.silence.asked()
        channel.send(*sent, fds=fds, timeout_s=timeout_s)

    def batches(self, keys: list[bytes]) -> Iterator[list[bytes]]:
        """`keys` in order, in batches that one message may carry."""
        most = self.limits.keys_per_request_max
        for start in range(0, len(keys), most):
            yield keys[start : start + most]

    def unavailable(self) -> TensordError:
        """Why there is no daemon, as a new error for each caller."""
        if self.silence.away:
            return self.silence.error()
        # A shared error would keep the frames of all its callers, with their payloads and views.
        return copy(self.error) if self.error else DaemonUnavailable(f"not attached to the daemon at {self.path}")

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
        self.puts.why_lost = "this process forked while it held views, and attaches anew; put it again"
        self.attachment.end()
        # Last: an interrupted call is repeated.
        self._lane_given_up = False

    def after_fork_in_child(self) -> None:
        """The child starts without an attachment. Inherited views keep their mappings."""
        if self.attachment.channel is not None:
            self.attachment.channel.close_in_child()
        self._replace_lane_fd(-1)
        self.view = None
        self.puts.disown()
        closed = self._stopping.is_set()
        self._reset()
        if closed:
            self._stopping.set()
        self.listeners.tell(lambda listener: listener.forked())

    # ---- the thread

    def _run(self) -> None:
        retry_s = _RETRY_FIRST_S
        while not self._over():
            try:
                channel = self._attach()
            except EndedHere:
                continue
            except (TensordError, OSError) as error:
                late = isinstance(error, TimedOut)
                if late:
                    text = f"{error}. Until it answers, nothing is stored"
                    no_answer(self.path, text, log=not self._required)
                self.error = absence(error, self.path, warn=not (late or self.epoch or self._required))
                self.attachment.settle()
                self._stopping.wait(retry_s)
                sweep_now_and_then()
                retry_s = min(retry_s * 2, _RETRY_MOST_S)
                continue
            retry_s = _RETRY_FIRST_S
            try:
                self.silence.heard()
                self.attachment.serving = channel
                self._receive(channel)
            except TensordError as error:
                self.error = error
            finally:
                self._detach(channel)
        self._finish()
        self.attachment.settle()

    def _over(self) -> bool:
        if self.owner() is None:
            self._stopping.set()
        return self._stopping.is_set()

    def _attach(self) -> BlockingChannel:
        deadline = time.monotonic() + self._attach_timeout_s
        fenced = fence.register()
        channel = BlockingChannel.connect(self.path, self._attach_timeout_s)
        self.attachment.channel = channel
        try:
            # SYNC POINT: the channel is stored before this look; `end` says so before it looks for the channel.
            if self._stopping.is_set():
                raise EndedHere("the client was closed while it attached")
            hello = messages.Hello(self.next_id(), PROTOCOL_VERSION, self.name, os.getpid(), fenced, __version__)
            # If the daemon has closed the connection, the error that it sent is read below.
            with suppress(DaemonUnavailable):
                channel.send(hello, timeout_s=self._attach_timeout_s)
            welcome, _ = channel.receive_one(messages.Welcome, deadline)
            self.limits = welcome.limits
            view = self.view
            brought = (self._lane_fd,) if self._lane_fd >= 0 and view is not None else ()
            attach = messages.Attach(self.next_id(), len(brought))
            channel.send(attach, fds=brought, timeout_s=self._attach_timeout_s)
            attached, fds = channel.receive_one(messages.Attached, deadline)
            view = self._take_memory(attached, fds, view)
            view.wait_for_own = self.puts.wait_for_own
            self.puts.attached(channel, view, attached.place)
        except BaseException as error:
            if self.attachment.detach(channel):
                raise EndedHere(str(error)) from None
            raise
        self.epoch = welcome.epoch
        self.instance, self.version, self.remote = welcome.instance, welcome.version, welcome.remote
        self.error = None
        return channel

    def _take_memory(self, attached: messages.Attached, fds: Sequence[int], before: View | None) -> View:
        ring_fd, index_fd, lane_fd = fds
        try:
            if before is not None and before.lane.lane_id == attached.lane_id:
                if self.view is not before:
                    raise EndedHere("this process forked while it attached, and gave up its lane")
                if before.is_over(index_fd):
                    # The daemon returned the same memory and this client's own lane: the mappings and all leases stay.
                    view = before if before.is_whole else View.open(ring_fd, index_fd, before.lane)
                    self.view = view
                    return view
            lane = Lane(lane_fd)
            # Before the first pin in it.
            forks.keep(lane)
            self.view = view = View.open(ring_fd, index_fd, lane)
            self._replace_lane_fd(lane_fd)
            lane_fd = -1
            return view
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise ring_not_mapped(os.fstat(ring_fd).st_size) from None
            raise
        finally:
            for fd in (ring_fd, index_fd, lane_fd):
                if fd >= 0:
                    os.close(fd)

    def _replace_lane_fd(self, fd: int) -> None:
        """Keeps `fd` (-1: none) as the lane's descriptor, and closes the one before. SYNC POINT: it is forgotten first.
        Another thread may open a file of its number and fork meanwhile; the child closes what is remembered."""
        before, self._lane_fd = self._lane_fd, fd
        if before >= 0:
            os.close(before)

    def _receive(self, channel: BlockingChannel) -> None:
        self.listeners.tell(lambda listener: listener.attached(channel))
        self.attachment.settle()
        rest_at = time.monotonic() + _IDLE_S
        while not self._over():
            if time.monotonic() >= rest_at:
                rest_at = time.monotonic() + _IDLE_S
                self.puts.rest()
            sweep_now_and_then()
            wait_s = self.silence.wait_s(_IDLE_S)
            if self.claims.held:
                self.claims.give_back_forgotten(SAY_S)
                wait_s = min(wait_s, max(0.0, self.claims.renew_at - time.monotonic()))
            with suppress(TimedOut):
                message, fds = channel.receive(wait_s)
                self.silence.heard()
                self.answers.received(message, fds, channel)
            self.silence.watch(bool(self.answers.pending) or self.puts.waiting, partial(self._probe, channel))
            if self.claims.held and time.monotonic() >= self.claims.renew_at:
                self.claims.renew(channel, _SEND_S)

    def _probe(self, channel: BlockingChannel) -> bool:
        # A daemon that does not read does not answer either.
        with suppress(TimedOut):
            channel.send(messages.Touch(self.next_id(), []), timeout_s=0.0)
            return True
        return False

    def _answers_or_not(self) -> None:
        """The daemon has ceased to answer: as without a daemon. Or it answers again."""
        self.error = self.silence.error() if self.silence.away else None
        if self.error is not None:
            self.answers.fail_all(self.error, optional_only=True)
        self.puts.silent(self.error)
        self.attachment.tell()

    def _detach(self, channel: BlockingChannel) -> None:
        # First: a caller that sees no connection finds no claim either.
        self.claims.held.clear()
        self.attachment.detach(channel)
        self.silence.ended()
        self.answers.fail_all(self.error or DaemonUnavailable(f"the connection to the daemon at {self.path} ended"))
        self.listeners.tell(lambda listener: listener.detached())
        closed = DaemonUnavailable("the client was closed before the daemon answered") if self.closed else None
        self.puts.ended(closed)
