"""What is known about puts whose record is written: which are stored, which were refused, and waiting for that.

    record 7 written ─ "sent" ─ settled ≥ 7 and all refusals known ─ "stored"
                              └ a refusal names 7 ─ "refused", or "existed"
                              └ the connection is lost before ─ "lost"

The daemon writes two words a lane: `settled`, the number of the last record that it has carried out, and before it
`refusals`, how many of these it refused. The connection may read the message of a refusal later than this process reads
`settled`. So a record at or below `settled` is stored only if as many messages were carried out as `refusals` says.

Owns: the outcomes of the puts of one connection, the lane's word `waits`. Does not own: records, messages.

Invariants: an outcome changes once. An outcome is "stored" only if the daemon has published the entry. At most
2 × QUEUE_RECORDS outcomes are kept here, since the queue holds no more records that are not settled. After the end of
the connection nothing here reads or keeps the memory: it may be another connection's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import RLock
from typing import Final, Literal, Self, TypeAlias

from ...errors import DaemonUnavailable, TensordError, TimedOut, without_frames
from ...ipc.messages.schema import DURATION_S_MAX
from ...shm.index.keys import shortened
from ...shm.lanes.records import WAITS_AT
from ...shm.ring.layout import QUEUE_RECORDS
from ..arguments.checks import check_timeout
from .wire import Wire

LOOK_S: Final = 0.00015
"""How long a wait looks before it sleeps: a daemon that is awake has carried a put out by then, and waking this thread
takes as long."""
OWN_WAIT_S: Final = 0.05
"""How long a lookup waits for this client's own put of its key."""
_NO_EPOCH: Final = memoryview(bytes(8)).cast("Q")

PutState: TypeAlias = Literal["sent", "stored", "existed", "refused", "lost"]


class Put:
    """One put and its state. `state` is

    - "sent": the payload is written; the caller may change the tree that it put.
    - "stored": every process on the host can read the entry.
    - "existed": an entry with this key was there already; nothing changed.
    - "refused": the daemon or this client refused the payload; `error` says why.
    - "lost": no daemon, the connection ended, or no room or answer in time; `error` says which.

    Example:
        >>> put = cache.put(key, np.arange(3))                      # returns once the array is copied
        >>> put.wait().state                                        # every process can read it now
        'stored'
        >>> cache.put(key, np.arange(3), wait=True).state
        'existed'
    """

    __slots__ = ("_refused", "_state", "error", "key", "number", "outcomes")

    def __init__(self, key: bytes, refused: Callable[[bytes, TensordError], object] | None = None) -> None:
        """`refused` is called with key and reason if the put is refused, in any thread. For the library."""
        self.key = key
        self.error: TensordError | None = None
        self._refused = refused
        self._state: PutState = "sent"
        self.number = 0
        self.outcomes: Outcomes | None = None
        """Its record, and where its outcome comes from, while it is "sent". For the library."""

    @property
    def state(self) -> PutState:
        """The state now. Sends no message."""
        outcomes = self.outcomes
        if outcomes is not None and outcomes.has_stored(self.number) and self._state == "sent":
            self._state = "stored"
            self.outcomes = None
        return self._state

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the put leaves the state "sent".

        Raises:
            UsageError: `timeout_s` is out of its range.
            TimedOut: the daemon did not answer within `timeout_s` seconds; the put goes on.
        """
        limit_s = check_timeout(timeout_s, DURATION_S_MAX)
        return self.wait_until(time.monotonic() + limit_s, limit_s)

    def wait_until(self, deadline: float, limit_s: float) -> Self:
        """`wait` until `deadline`, by time.monotonic. `limit_s`: the caller's limit, for the error. For the library."""
        if self.state != "sent":
            return self
        outcomes = self.outcomes
        if outcomes is None or not outcomes.wait_for(self.number, deadline, self):
            raise TimedOut(f"the put of {shortened(self.key)} was not acknowledged within {limit_s:.3g} s; it goes on")
        return self

    def settle(self, state: PutState, error: TensordError | None = None) -> None:
        """Sets the outcome. For the library."""
        # The error first: a thread that sees "refused" finds its reason.
        self.error = error and without_frames(error)
        self._state = state
        self.outcomes = None
        if state == "refused" and self._refused is not None and self.error is not None:
            self._refused(self.key, self.error)

    def __repr__(self) -> str:
        return f"Put({shortened(self.key)}, {self.state}{f', {self.error!r}' if self.error else ''})"


class Outcomes:
    """The puts of one connection. Thread-safe. `words`: the lane as native u64 words, with the word `waits`.
    `settled`, `refusals`: the daemon's words, of which number `lane` is this lane's. `epochs`: the word that says which
    daemon writes both."""

    def __init__(
        self,
        words: memoryview,
        settled: memoryview,
        refusals: memoryview,
        lane: int,
        wire: Wire,
        epochs: memoryview = _NO_EPOCH,
    ) -> None:
        self._words, self._lane = words, lane
        self._settled: memoryview | dict[int, int] = settled
        self._refusals: memoryview | dict[int, int] = refusals
        self._wire = wire
        self._epochs, self._epoch = epochs, epochs[0]
        # Reentrant: a signal handler may look keys up.
        self._lock = RLock()
        self._known: int = refusals[lane]
        """How many refusals were carried out here."""
        self._open: dict[int, Put] = {}
        self._early: dict[int, TensordError | None] = {}
        """Refusals of records whose put has not come to `note` yet."""
        self._waiting: list[int] = []
        self.unsettled: dict[bytes, Put] = {}
        """Puts of this client by key, the last of each. Some of them may be settled."""
        self.ended: TensordError | None = None

    @property
    def settled(self) -> int:
        """The number of the last record that the daemon has carried out."""
        number: int = self._settled[self._lane]
        return number

    def has_stored(self, number: int) -> bool:
        """Whether a record that no message has named is stored."""
        # SYNC POINT: the daemon stores `refusals`, then `settled`. x86-64 keeps loads in order, too. The next daemon,
        # which may give the lane's words to another one, stores its epoch first.
        return (
            0 < number <= self._settled[self._lane]
            and self._refusals[self._lane] == self._known
            and bool(self._epochs[0] == self._epoch)
        )

    def note(self, outcome: Put, number: int) -> None:
        """Keeps a put whose record was just written."""
        # The number first: without it, the put's state does not ask here.
        outcome.number = number
        outcome.outcomes = self
        self._open[number] = self.unsettled[outcome.key] = outcome
        # After it is kept: whoever carries a refusal out looks in the other order.
        if self._early and number in self._early:
            self._refuse(number)
        if self.ended is not None:
            self._lose()
        if number % QUEUE_RECORDS == 0:
            self._forget_settled()

    def refused(self, number: int, error: TensordError | None) -> None:
        """The daemon refused a record. `error`: None if an entry with this key existed. `Wire.rang` follows."""
        self._early[number] = error
        self._refuse(number)
        # After the outcome: a thread that finds the counts equal may take any other record for stored.
        self._known += 1

    def wait_for(self, number: int, deadline: float, outcome: Put | None = None) -> bool:
        """Waits until the daemon has carried out record `number`, and with `outcome` until that is known, too. Returns
        False if that did not happen by `deadline`, by time.monotonic, or the connection ended."""
        settled, lane = self._settled, self._lane
        if settled[lane] < number:
            until = time.monotonic() + LOOK_S
            while settled[lane] < number and time.monotonic() < until:
                pass
        if self._is_done(number, outcome):
            return True
        try:
            # SYNC POINT: `waits` is stored before `settled` is loaded again, since the lock is given back by a locked
            # instruction, a full fence on x86-64. The daemon stores `settled` before it loads `waits`.
            with self._lock:
                self._wait_up_to([*self._waiting, number])
            self._wire.ring_to_wait()
            while True:
                seen = self._wire.bells
                if self._is_done(number, outcome):
                    return True
                if self.ended is not None:
                    self._lose()
                    return outcome is not None
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._wire.wait_for_bell(seen, left_s)
        finally:
            with self._lock:
                if number in self._waiting:
                    self._waiting.remove(number)
                self._wait_up_to(self._waiting)

    def wait_for_own(self, key: bytes) -> bool:
        """Waits for this client's last put of a key, so that a get of the same client finds it. Returns whether it is
        worth to look again: there was such a put, and it is settled now."""
        outcome = self.unsettled.get(key)
        return outcome is not None and self._has_settled(outcome)

    def awaited(self) -> dict[bytes, Put]:
        """The puts of this client by key that are not settled yet. Forgets the others."""
        settled = self.settled
        awaited = {}
        for key, outcome in list(self.unsettled.items()):
            if outcome.number > settled:
                awaited[key] = outcome
            else:
                self.unsettled.pop(key, None)
        return awaited

    def wait_for_puts(self, keys: Iterable[bytes] | None = None) -> None:
        """Waits for all puts of this client, or for those of some keys, OWN_WAIT_S at most."""
        awaited = self.awaited()
        if own := list(awaited.values()) if keys is None else [awaited[key] for key in keys if key in awaited]:
            self._has_settled(max(own, key=lambda outcome: outcome.number))

    def end(self, error: TensordError) -> None:
        """The connection is lost: what is settled is stored, everything else is lost. `Wire.rang` follows."""
        if self.ended is None:
            self._stop_reading()
            self.ended = without_frames(error)
        self._lose()

    def disown(self) -> None:
        """In the child of a fork: the puts belong to the parent. Takes no lock that a thread of the parent may hold."""
        self._lock = RLock()
        self.end(DaemonUnavailable("this process was forked before the daemon acknowledged the put"))

    def _has_settled(self, outcome: Put) -> bool:
        """Waits for a put of this client. After one that was not settled in time, no get waits for the puts until now:
        a daemon that is late for one of them is late for all."""
        if not self.wait_for(outcome.number, time.monotonic() + OWN_WAIT_S):
            self.unsettled.clear()
            return False
        if self.unsettled.get(outcome.key) is outcome:
            self.unsettled.pop(outcome.key, None)
        return True

    def _stop_reading(self) -> None:
        lane = self._lane
        settled, refusals = self._settled[lane], self._refusals[lane]
        if self._epochs[0] != self._epoch:
            # They are the next daemon's already.
            settled = 0
        self._settled, self._refusals, self._epochs = {lane: settled}, {lane: refusals}, _NO_EPOCH
        self._epoch = 0
        self._words = memoryview(bytearray(8 * (WAITS_AT + 1))).cast("Q")

    def _is_done(self, number: int, outcome: Put | None) -> bool:
        return self._settled[self._lane] >= number if outcome is None else outcome.state != "sent"

    def _wait_up_to(self, numbers: list[int]) -> None:
        """Sets `waits`. The caller has the lock."""
        # A wait that an exception cut short may have left its number.
        settled = self._settled[self._lane]
        self._waiting = [number for number in numbers if number > settled]
        self._words[WAITS_AT] = min(self._waiting, default=0)

    def _refuse(self, number: int) -> None:
        outcome = self._open.pop(number, None)
        if outcome is None:
            return
        error = self._early.pop(number, None)
        outcome.settle("existed" if error is None else "refused", error)

    def _lose(self) -> None:
        while self._open:
            with suppress(KeyError):
                outcome = self._open.popitem()[1]
                if outcome.state == "sent":
                    outcome.settle("lost", self.ended)
        self.unsettled.clear()

    def _forget_settled(self) -> None:
        """Settles what is stored, and forgets it. A batch at a time, so that it costs each put next to nothing."""
        with self._lock:
            settled = self.settled
            for number, outcome in list(self._open.items()):
                if number <= settled and outcome.state != "sent":
                    self._open.pop(number, None)
            for key, outcome in list(self.unsettled.items()):
                if outcome.number <= settled:
                    self.unsettled.pop(key, None)
            for number in list(self._early):
                if number <= settled - QUEUE_RECORDS:
                    self._early.pop(number, None)


def wait_for_all(puts: Iterable[Put], deadline: float, limit_s: float) -> None:
    """`Put.wait_until` of all puts."""
    for put in puts:
        if put.state == "sent":
            put.wait_until(deadline, limit_s)
