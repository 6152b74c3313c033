"""What is known about puts whose record is written: which are stored, which were refused, and waiting for that.

    record 7 written ─ "sent" ─ settled ≥ 7 and all refusals known ─ "stored"
                              └ a refusal names 7 ─ "refused", or "existed"
                              └ the connection is lost before ─ "lost"

The daemon writes two words a lane: `settled`, the number of the last record that it has carried out, and before it
`refusals`, how many of these records it refused. It sends a message for each refusal, which the connection may read
later than this process reads `settled`. So a record at or below `settled` is stored only if as many messages were
carried out as `refusals` says.

Owns: the outcomes of the puts of one connection, the lane's word `waits`. Does not own: records, messages.

Invariants: an outcome changes once. An outcome is "stored" only if the daemon has published the entry. At most
2 × QUEUE_RECORDS outcomes are kept here, since the queue holds no more records that are not settled.
"""

from __future__ import annotations

import time
from threading import Lock
from typing import Final, Literal, Self, TypeAlias

from ...errors import DaemonUnavailable, TensordError, TimedOut, without_frames
from ...shm.records import QUEUE_RECORDS, WAITS_AT
from .connection import Wire

LOOKS: Final = 40
"""How often a wait looks before it sleeps, which takes a few microseconds. More do not help on a busy machine."""
OWN_WAIT_S: Final = 0.05

PutState: TypeAlias = Literal["sent", "stored", "existed", "refused", "lost"]


class PutOutcome:
    """One put and its state:

    - "sent": the payload is written, or was; the caller may change the tree that it put.
    - "stored": every process on the host can read the entry.
    - "existed": an entry with this key was there already; nothing changed.
    - "refused": the daemon or this client refused the payload; `error` says why.
    - "lost": no daemon, the connection ended, or no room in time; `error` says which.
    """

    __slots__ = ("_outcomes", "_state", "error", "key", "number")

    def __init__(self, key: bytes, outcomes: Outcomes) -> None:
        self.key = key
        self.number = 0
        self.error: TensordError | None = None
        self._state: PutState = "sent"
        self._outcomes = outcomes

    @property
    def state(self) -> PutState:
        """The state now. Takes no message and no lock."""
        if self._state == "sent" and self._outcomes.has_stored(self.number) and self._state == "sent":
            self._state = "stored"
        return self._state

    def wait(self, timeout_s: float) -> Self:
        """Waits until the put leaves the state "sent".

        Raises:
            TimedOut: the daemon did not settle the put within `timeout_s` seconds; the put goes on.
        """
        if self.state == "sent" and not self._outcomes.wait_for(self.number, time.monotonic() + timeout_s, self):
            name = self.key.hex()[:16]
            raise TimedOut(f"the put of {name}… was not acknowledged within {timeout_s:.3g} s; it goes on")
        return self

    def settle(self, state: PutState, error: TensordError | None = None) -> None:
        """Sets the outcome. For the library."""
        # The error first: a thread that sees "refused" finds its reason.
        self.error = error and without_frames(error)
        self._state = state

    def __repr__(self) -> str:
        return f"PutOutcome({self.key.hex()[:16]}…, {self.state}{f', {self.error!r}' if self.error else ''})"


class Outcomes:
    """The puts of one connection. Thread-safe.

    Args:
        words: the lane as native u64 words, with the word `waits`.
        settled: the daemon's words, of which `lane` is this lane's.
        refusals: the same, for the count of refusals.
    """

    def __init__(self, words: memoryview, settled: memoryview, refusals: memoryview, lane: int, wire: Wire) -> None:
        self._words, self._settled, self._refusals, self._lane = words, settled, refusals, lane
        self._wire = wire
        self._lock = Lock()
        self._known: int = refusals[lane]
        """How many refusals were carried out here."""
        self._open: dict[int, PutOutcome] = {}
        self._early: dict[int, TensordError | None] = {}
        """Refusals of records whose put has not come to `note` yet."""
        self._waiting: list[int] = []
        self.unsettled: dict[bytes, PutOutcome] = {}
        """Puts of this client by key, the last of each. Some of them may be settled."""
        self.ended: TensordError | None = None

    @property
    def settled(self) -> int:
        """The number of the last record that the daemon has carried out."""
        number: int = self._settled[self._lane]
        return number

    def has_stored(self, number: int) -> bool:
        """Whether a record that no message has named is stored."""
        # SYNC POINT: the daemon stores `refusals`, then `settled`. x86-64 keeps loads in order, too.
        return 0 < number <= self._settled[self._lane] and self._refusals[self._lane] == self._known

    def note(self, outcome: PutOutcome, number: int) -> None:
        """Keeps a put whose record was just written."""
        outcome.number = number
        self._open[number] = self.unsettled[outcome.key] = outcome
        # After it is kept: whoever carries a refusal out looks in the other order.
        if self._early and number in self._early:
            self._refuse(number)
        if self.ended is not None:
            self._lose([outcome])
        if number % QUEUE_RECORDS == 0:
            self._forget_settled()

    def refused(self, number: int, error: TensordError | None) -> None:
        """The daemon refused a record. `error`: None if an entry with this key existed. For the connection, which
        raises `bells` afterwards."""
        self._early[number] = error
        self._refuse(number)
        # After the outcome: a thread that finds the counts equal may take any other record for stored.
        self._known += 1

    def wait_for(self, number: int, deadline: float, outcome: PutOutcome | None = None) -> bool:
        """Waits until the daemon has carried out record `number`, and with `outcome` until that is known, too.

        Returns:
            False if that did not happen by `deadline`, in seconds of `time.monotonic()`, or the connection ended.
        """
        settled, lane = self._settled, self._lane
        for _ in range(LOOKS):
            if settled[lane] >= number:
                break
        if self._is_done(number, outcome):
            return True
        try:
            # SYNC POINT: `waits` is stored before `settled` is loaded again, since the lock is given back by a locked
            # instruction, a full fence on x86-64. The daemon stores `settled` before it loads `waits`.
            with self._lock:
                self._wait_up_to([*self._waiting, number])
            while True:
                seen = self._wire.bells
                if self._is_done(number, outcome):
                    return True
                if self.ended is not None:
                    if outcome is not None:
                        self._lose([outcome])
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

    def wait_for_own(self, key: bytes, timeout_s: float = OWN_WAIT_S) -> bool:
        """Waits for this client's last put of a key, so that a get of the same client finds it.

        Returns:
            Whether it is worth to look again: there was such a put, and it is settled now.
        """
        outcome = self.unsettled.get(key)
        if outcome is None or not self.wait_for(outcome.number, time.monotonic() + timeout_s):
            return False
        if self.unsettled.get(key) is outcome:
            self.unsettled.pop(key, None)
        return True

    def end(self, error: TensordError) -> None:
        """The connection is lost: what is settled is stored, everything else is lost. For the connection, which raises
        `bells` afterwards."""
        self.ended = without_frames(error)
        self._lose(list(self._open.values()))
        self._open.clear()
        self.unsettled.clear()

    def disown(self) -> None:
        """In the child of a fork: the puts belong to the parent. Takes no lock that a thread of the parent may hold."""
        self._lock = Lock()
        self._words = memoryview(bytearray(self._words.nbytes)).cast("Q")
        self.end(DaemonUnavailable("this process was forked before the daemon acknowledged the put"))

    def _is_done(self, number: int, outcome: PutOutcome | None) -> bool:
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

    def _lose(self, outcomes: list[PutOutcome]) -> None:
        for outcome in outcomes:
            if outcome.state == "sent":
                outcome.settle("lost", self.ended)

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
