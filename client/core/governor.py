"""How full the tiers are, as the daemon tells it: modes, who wants to hear of them, and workflows to be said again.

Owns: the subscription of one client, the thread that callbacks run in, and what a new daemon must be told of. Does not
own what follows from a mode: that is the daemon's policy, and the engine's that asked to be told.

Invariants: one callback runs at a time, in the order of the daemon's words. Whatever a callback does, the next one is
called. A gauge is told of once for each change of mode that this client learned of: what happened while the daemon was
away comes as one difference when it is back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, Self

from ...errors import Refusal, Unavailable
from ...ipc import messages
from ...ipc.modes import Mode, Tier
from .aside import aside
from .fields import check_name
from .link import SAY_S, Connected, Link, Told
from .waiting import Condition

CHANGES_MAX: Final = 1024
"""Changes that wait for a callback; the oldest are forgotten."""
_BRIEF_S: Final = 0.05
_log = logging.getLogger("tensord")

TierState = messages.TierState


@dataclass(frozen=True, slots=True)
class ModeChange:
    """A tier went from one mode into another. `refuses`: nothing new is taken in until this mode is left.

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


class Restored(Protocol):
    """What a new daemon must be told of."""

    def say_again(self, connected: Connected) -> None:
        """Says it on this connection. Called in the link's thread."""


class Subscription:
    """A callback that hears of modes until it is closed. Use it in a `with`, or keep it until the process ends.

    `dropped`: changes that it was not told of, since it had not come back from CHANGES_MAX others.

    Example:
        >>> def listen(change: tensord.ModeChange) -> None:
        ...     print(change.gauge, change.mode)
        >>> with cache.on_mode(listen, gauge="host") as subscription:
        ...     list(subscription.states)
        ['host']
    """

    def __init__(self, governor: GovernorListener, callback: Callable[[ModeChange], object], gauge: str | None) -> None:
        self._governor = governor
        self._callback = callback
        self.gauge = gauge
        self.dropped = 0
        self.closed = False

    @property
    def states(self) -> dict[str, TierState]:
        """The gauges that it hears of, as last told; empty as long as there was no daemon."""
        states = self._governor.states
        return {name: state for name, state in states.items() if self.gauge in (None, name)}

    def close(self) -> None:
        """Calls the callback no more; a call that is under way is not waited for."""
        self.closed = True
        self._governor.forget(self)

    def tell(self, change: ModeChange) -> None:
        """Calls the callback. For the library."""
        if self.closed or self.gauge not in (None, change.gauge):
            return
        try:
            self._callback(change)
        except Exception:
            _log.exception("on_mode: the callback failed at %s of %s", change.mode, change.gauge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GovernorListener:
    """One client's ear for the daemon's governor. Hears the link, and is held by the client."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._begin()
        link.listen(self)

    def _begin(self) -> None:
        self._lock = Condition()
        self._states: dict[str, TierState] = {}
        self._subscriptions: tuple[Subscription, ...] = ()
        self._restored: tuple[Restored, ...] = ()
        self._wanted = False
        self._unread = False
        self._subscribed: Connected | None = None
        self._changes: deque[ModeChange] = deque()
        self._thread: threading.Thread | None = None

    # ---- for callers

    @property
    def states(self) -> dict[str, TierState]:
        """All gauges, as last told."""
        return dict(self._states)

    def on_mode(self, callback: Callable[[ModeChange], object], gauge: str | None, timeout_s: float) -> Subscription:
        """Calls `callback` at every change from now on. Without a daemon: as soon as there is one."""
        if gauge is not None:
            check_name("gauge", gauge)
        subscription = Subscription(self, callback, gauge)
        aside(partial(self._listen, subscription))
        with suppress(Unavailable):
            self.subscribe(timeout_s)
        return subscription

    def _listen(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensord-modes", daemon=True)
                self._thread.start()

    def subscribe(self, timeout_s: float) -> None:
        """Has the daemon tell of modes, this one and all to come, and waits for how they are now.

        Raises:
            DaemonUnavailable, TimedOut: it will be asked when it is there.
        """
        self._wanted = True
        connected = self._link.connection
        if connected is None:
            raise self._link.unavailable()
        if self._subscribed is not connected:
            self._link.answer(self._link.ask(messages.Subscribe, timeout_s, connected=connected), timeout_s)

    def watch(self) -> None:
        """The same without waiting: whoever listens to the link hears of modes."""
        self._wanted = True
        connected = self._link.connection
        if connected is not None and self._subscribed is not connected:
            self._link.ask(messages.Subscribe, SAY_S, connected=connected)

    def forget(self, subscription: Subscription) -> None:
        """Ends a subscription."""
        with self._lock:
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)
            self._lock.notify_all()

    def restore(self, restored: Restored) -> None:
        """Has it said again to every daemon to come."""
        with self._lock:
            self._restored = (*self._restored, restored)

    def drop(self, restored: Restored) -> None:
        """It is to be said no more."""
        with self._lock:
            self._restored = tuple(each for each in self._restored if each is not restored)

    def tell(self, message: messages.Message) -> None:
        """Says something that needs no answer, or nothing at all where there is no daemon. Hardly ever waits."""
        with suppress(Unavailable, Refusal):
            self._link.send(message, timeout_s=_BRIEF_S)

    # ---- the link's words

    def attached(self, connected: Connected) -> None:
        """A daemon that knows nothing of this client."""
        if self._wanted:
            self._link.ask(messages.Subscribe, SAY_S, connected=connected)
        for restored in self._restored:
            restored.say_again(connected)

    def detached(self) -> None:
        """The last states are kept: what has changed meanwhile is told when there is a daemon again."""
        self._subscribed = None
        if self._link.closed:
            with self._lock:
                self._lock.notify_all()

    def told(self, message: Told, connected: Connected) -> None:
        """In the link's thread: notes it, and leaves the callbacks to theirs."""
        match message:
            case messages.Modes():
                self._subscribed = connected
                # A daemon that has just begun has read no gauge yet: it pushes each at its first reading.
                self._unread = not message.tiers
                if message.tiers:
                    self._learned({state.gauge: state for state in message.tiers})
            case messages.ModeChanged(before=before, state=state):
                if self._unread:
                    # All are read now: which of those that the former daemon had are gone?
                    self._unread = False
                    self._link.ask(messages.Subscribe, SAY_S, connected=connected)
                known = self._states.get(state.gauge)
                self._states = {**self._states, state.gauge: state}
                self._compared(before if known is None else known.mode, state)
            case _:
                pass

    def _learned(self, states: dict[str, TierState]) -> None:
        """These are all gauges that there are. One that is gone counts as relaxed."""
        known, self._states = self._states, states
        for name, last in known.items():
            gone = TierState(name, last.tier, Mode.RELAXED, last.used_bytes, last.total_bytes)
            self._compared(last.mode, states.get(name, gone))

    def forked(self) -> None:
        """Subscriptions and workflows are the parent's."""
        for subscription in self._subscriptions:
            subscription.closed = True
        self._begin()

    # ---- the thread of callbacks

    def _compared(self, before: Mode, state: TierState) -> None:
        if before is not state.mode:
            self._changed(before, state)

    def _changed(self, before: Mode, state: TierState) -> None:
        change = ModeChange(
            state.gauge, state.tier, before, state.mode, state.used_bytes, state.total_bytes, state.refuses
        )
        with self._lock:
            if not self._subscriptions:
                return
            if len(self._changes) >= CHANGES_MAX:
                self._changes.popleft()
                for subscription in self._subscriptions:
                    subscription.dropped += 1
            self._changes.append(change)
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._changes:
                    if not self._subscriptions or self._link.closed:
                        self._thread = None
                        return
                    self._lock.wait()
                change = self._changes.popleft()
                subscriptions = self._subscriptions
            for subscription in subscriptions:
                subscription.tell(change)
