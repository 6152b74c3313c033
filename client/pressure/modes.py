"""Modes of the tiers, as the daemon reports them, and registrations that a new daemon needs.

Owns: one client's subscription to modes, the thread that runs callbacks, and the objects that register again at a new
daemon. Does not own: the effects of a mode.
Invariants: one callback runs at a time, in the order of the daemon's messages. Subscribers get one change for each
change of mode that this client learned of. Changes while the daemon was away are merged into one, reported once it is
back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import Final

from ...errors import LimitReached, Refusal, Unavailable, UsageError, shown
from ...ipc.messages import control as messages
from ...ipc.messages.modes import Mode, Tier
from ..arguments.checks import check_name
from ..link.answers import ListenerMessage, PendingRequest
from ..link.link import SAY_S, Connected, Link
from ..threads.aside import aside, begin
from ..threads.of_process import Closable
from ..threads.waiting import SimpleQueue

CHANGES_MAX: Final = 1024
"""Limit of changes that wait for a callback. Beyond it the oldest are dropped."""
_BRIEF_S: Final = 0.05
_log = logging.getLogger("tensord")

TierState = messages.TierState


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A tier's change from one mode to another. `refuses`: the tier admits no new entries in this mode.

    Example:
        >>> change = tensord.ModeChange(
        ...     "host", tensord.Tier.HOST, tensord.Mode.NORMAL, tensord.Mode.CRITICAL, 15 << 30, 16 << 30, False
        ... )
        >>> change.mode == "critical", change.used_bytes / change.total_bytes
        (True, 0.9375)
    """

    gauge: str
    tier: Tier
    before: Mode
    mode: Mode
    used_bytes: int
    total_bytes: int
    refuses: bool


class Subscription(Closable):
    """A callback for mode changes, until it is closed. Use it in a `with`, or keep it until the process ends.

    Example:
        >>> def listen(change: tensord.ModeChange) -> None:
        ...     print(change.gauge, change.mode)
        >>> with cache.on_mode(listen, gauge="host") as subscription:
        ...     list(subscription.states)
        ['host']
    """

    _instead = "subscribe in each process"

    def __init__(self, governor: GovernorListener, callback: Callable[[ModeChange], object], gauge: str | None) -> None:
        self._governor = governor
        self._callback = callback
        self.gauge = gauge
        self.closed = False

    @property
    def states(self) -> dict[str, TierState]:
        """The last reported state of each subscribed gauge, by its name; empty before the first connection."""
        return {name: state for name, state in self._governor.states.items() if self.gauge in (None, name)}

    def close(self) -> None:
        """Ends the subscription. Does not wait for a call of the callback that is under way."""
        self.closed = True
        self._governor.forget(self)

    def tell(self, change: ModeChange) -> None:
        """Calls the callback. For the library."""
        if self.closed or self.gauge not in (None, change.gauge):
            return
        try:
            self._callback(change)
        except Exception:
            _log.exception("on_mode callback failed; change to mode %s of gauge %s", change.mode, change.gauge)


class GovernorListener:
    """A client's listener for the daemon's governor. The link refers to it weakly; the client holds it. `states`: the
    last reported state of each gauge, by its name; replaced, and never changed."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._begin()
        link.listeners.add(self)

    def _begin(self) -> None:
        self.states: dict[str, TierState] = {}
        self._subscriptions: list[Subscription] = []
        self._kept: dict[object, Callable[[Connected], object]] = {}
        """What is told to each new daemon. No lock: each change is one step."""
        self._wanted = False
        self._unread = False
        self._subscribed: Connected | None = None
        self._changes: SimpleQueue[ModeChange | None] = SimpleQueue()
        """None: the client is closed."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        """Held in threads that no signal handler interrupts."""

    # ---- for callers

    def on_mode(self, callback: Callable[[ModeChange], object], gauge: str | None, timeout_s: float) -> Subscription:
        """Calls `callback` at every change from now on. Without a daemon, the changes begin once there is one."""
        if not callable(callback):
            raise UsageError(f"callback is {shown(callback)}; it must be a function of one ModeChange")
        if gauge is not None:
            check_name("gauge", gauge)
        subscription = Subscription(self, callback, gauge)
        aside(partial(self._listen, subscription))
        with suppress(Unavailable, LimitReached):
            self.subscribe(timeout_s)
        return subscription

    def _listen(self, subscription: Subscription) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tensord-modes", daemon=True)
                begin(thread)
                self._thread = thread
        self._subscriptions.append(subscription)

    def subscribe(self, timeout_s: float) -> None:
        """Subscribes to modes on this connection and all later ones, and waits for the current state. Raises
        DaemonUnavailable or TimedOut without an answer; the client subscribes once there is a daemon."""
        answer = self.watch(timeout_s)
        if answer is not None:
            self._link.answers.wait(answer, timeout_s)
        elif self._link.attached is None:
            raise self._link.unavailable()

    def watch(self, timeout_s: float = SAY_S) -> PendingRequest | None:
        """`subscribe` without waiting; the answer, or None if none will come. Modes then reach all listeners of the
        link."""
        self._wanted = True
        connected = self._link.attached
        if connected is None or self._subscribed is connected:
            return None
        return self._link.ask(messages.Subscribe, timeout_s, connected=connected)

    def state_of(self, gauge: str) -> TierState | None:
        """The state of a gauge as the present daemon has reported it; None without one, or without the gauge."""
        is_current = self._subscribed is not None and self._subscribed is self._link.connection
        return self.states.get(gauge) if is_current else None

    def forget(self, subscription: Subscription) -> None:
        with suppress(ValueError):
            self._subscriptions.remove(subscription)

    def keep(self, name: object, tell: Callable[[Connected], object] | None) -> None:
        """Has `tell` send a registration to each new daemon; None: no more. The link's thread calls it. The child of a
        fork has none of its parent's."""
        if tell is not None:
            self._kept[name] = tell
        else:
            self._kept.pop(name, None)

    def tell(self, message: messages.Message) -> None:
        """Sends a message that needs no answer. Drops it without a daemon, or if sending takes over 50 ms."""
        with suppress(Unavailable, Refusal):
            self._link.send(message, timeout_s=_BRIEF_S)

    # ---- calls of the link

    def attached(self, connected: Connected) -> None:
        """Subscribes and registers at the new daemon."""
        if self._wanted:
            self._link.ask(messages.Subscribe, SAY_S, connected=connected)
        for tell in list(self._kept.values()):
            tell(connected)

    def detached(self) -> None:
        """Keeps the last states, to compare them with those of the next daemon."""
        self._subscribed = None
        if self._link.closed:
            self._changes.put(None)

    def received(self, message: ListenerMessage, connected: Connected) -> None:
        """Runs in the link's thread: stores the state, and queues changes for the callbacks' thread."""
        match message:
            case messages.Modes():
                self._subscribed = connected
                # A daemon that has just started has no gauge's reading yet. It pushes each gauge at its first reading.
                self._unread = not message.tiers
                if message.tiers:
                    self._learned({state.gauge: state for state in message.tiers})
            case messages.ModeChanged(before=before, state=state):
                if self._unread:
                    # All gauges are read now. The answer shows which of the former daemon's gauges are gone.
                    self._unread = False
                    self._link.ask(messages.Subscribe, SAY_S, connected=connected)
                known = self.states.get(state.gauge)
                self.states = {**self.states, state.gauge: state}
                self._compared(before if known is None else known.mode, state)
            case _:
                pass

    def _learned(self, states: dict[str, TierState]) -> None:
        """Takes over the states of all existing gauges. A gauge that is gone counts as relaxed."""
        known, self.states = self.states, states
        for name, last in known.items():
            gone = TierState(name, last.tier, Mode.RELAXED, last.used_bytes, last.total_bytes)
            self._compared(last.mode, states.get(name, gone))

    def forked(self) -> None:
        """Subscriptions and workflows belong to the parent: closes them in the child."""
        for subscription in self._subscriptions:
            subscription.closed = True
        self._begin()

    # ---- the thread of callbacks

    def _compared(self, before: Mode, state: TierState) -> None:
        if before is state.mode or not self._subscriptions:
            return
        change = ModeChange(
            state.gauge, state.tier, before, state.mode, state.used_bytes, state.total_bytes, state.refuses
        )
        if self._changes.qsize() >= CHANGES_MAX:
            with suppress(Empty):
                self._changes.get_nowait()
        self._changes.put(change)

    def _run(self) -> None:
        changes = self._changes
        while not self._link.closed:
            if (change := changes.get()) is not None:
                for subscription in list(self._subscriptions):
                    subscription.tell(change)
