"""The places in which this client may write: grants of the daemon, and how many of them to ask for.

    put takes a place ─ the smallest grant that is large enough, whose rest stays lent
    half of what was asked for is left, or less ─ asks for more, and waits for nothing
    nothing is large enough ─ asks for a place of that size and four times as many others as before, and waits

Invariants: the bytes of two places never overlap. A grant is pinned as long as it is in the arena or a copy into it is
under way: each put holds the grant until its record is written, also if an exception ends the put. With its last
reference its number is noted, and returned to the daemon with the next request: everything that was written in it has a
record by then. The lock is held for no call that waits.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from threading import RLock
from typing import Final
from weakref import ref

from ...errors import LimitReached, TensordError, TimedOut, without_frames
from ...shm.ring.layout import LANE_WORDS, span_bytes
from .memory import WritableMemory
from .wire import Granted, Wire

AHEAD_MAX: Final = 256
"""The most places that one request asks for."""
GRANTS_MAX: Final = 1024
"""The most grants that are kept ahead of need, and that one message returns. Each takes a word of the lane, which
leases need too."""
SIZES_KEPT: Final = 64
ERRORS_MAX: Final = 64
LEAST_BYTES: Final = span_bytes(1)
"""A grant with less is used up."""


class Grant:
    """What is left of a place: bytes `offset` to `end`."""

    __slots__ = ("__weakref__", "end", "number", "offset", "pin")

    def __init__(self, number: int, offset: int, end: int, pin: object) -> None:
        self.number, self.offset, self.end, self.pin = number, offset, end, pin


class Arena:
    """The grants of one connection. Thread-safe. `ended`: why there will be none any more. `share_bytes`: the most that
    one request asks for, and that the client has unused while it waits for a place, unless that place is larger."""

    def __init__(self, memory: WritableMemory, wire: Wire, share_bytes: int) -> None:
        self._memory, self._wire, self._share_bytes = memory, wire, share_bytes
        # Reentrant: a signal handler may close the client.
        self._lock = RLock()
        self._grants: list[tuple[int, int, Grant]] = []
        """(bytes left, number, grant), in ascending order."""
        self.left_bytes = 0
        """Bytes that are lent and not used yet."""
        self._low_bytes = 0
        """When this is left, or less, more is asked for."""
        self._lately: deque[int] = deque(maxlen=SIZES_KEPT)
        self._ahead = 1
        self._numbers: dict[ref[Grant], int] = {}
        self._over: deque[ref[Grant]] = deque()
        """Grants in which nothing more is written, and which the daemon does not know yet. A function in C appends
        them, which no signal handler cuts short."""
        self._asked: dict[int, int] = {}
        """Requests that are not answered: the bytes of the largest place."""
        self._ahead_request = 0
        """The one for places ahead of need; 0: none is under way."""
        self._errors: dict[int, TensordError] = {}
        """Why requests were refused lately."""
        self._waiting: dict[object, int] = {}
        """The bytes that each put waits for."""
        self._taken = 0
        """Places taken since the last `rest`."""
        self.ended: TensordError | None = None
        self.away: TensordError | None = None
        """Why no put waits for a place, while the daemon does not answer."""

    def take(self, size_bytes: int) -> tuple[Grant, int] | None:
        """Takes a place of `size_bytes`, a multiple of 64. Returns its grant, which is held until the record is
        written, and its offset. None if no grant is large enough, but for one that a larger put waits for."""
        with self._lock:
            grants = self._grants
            at = bisect_left(grants, (size_bytes,))
            if at == len(grants) or (self._waiting and self._is_awaited(grants[at][0], size_bytes)):
                return None
            grant = grants.pop(at)[2]
            offset = grant.offset
            grant.offset = end = offset + size_bytes
            left = grant.end - end
            self.left_bytes -= size_bytes
            if left >= LEAST_BYTES:
                insort(grants, (left, grant.number, grant))
            else:
                self.left_bytes -= left
            self._lately.append(size_bytes)
            self._taken += 1
        if self.left_bytes <= self._low_bytes and not self._ahead_request:
            self._ask_ahead()
        return grant, offset

    def wait_for(self, size_bytes: int, deadline: float) -> tuple[Grant, int]:
        """`take` that asks for a place, and waits until there is one. Raises the daemon's error or `ended`, or TimedOut
        at `deadline`, in seconds of `time.monotonic()`."""
        request, is_own, here = 0, False, object()
        with self._lock:
            self._ahead = min(4 * self._ahead, AHEAD_MAX)
            self._lately.append(size_bytes)
        try:
            self._waiting[here] = size_bytes
            while True:
                # Before the look, so that what comes after it ends the wait.
                seen = self._wire.bells
                if (error := self.ended or self.away) is not None:
                    raise error
                if (taken := self.take(size_bytes)) is not None:
                    return taken
                self._let_go_above(max(self._share_bytes, size_bytes))
                if request not in self._asked:
                    # The first time, or another thread was faster, or the place was too small.
                    if is_own and (error := self._errors.get(request)) is not None:
                        raise error
                    # A request under way may bring a place of this size.
                    asked = [number for number, most in [*self._asked.items()] if most >= size_bytes]
                    is_own = not asked
                    if asked:
                        request = asked[0]
                    else:
                        with self._lock:
                            request, sizes = self._next_request(size_bytes)
                        self._say(request, sizes, max(0.0, deadline - time.monotonic()))
                elif self._over:
                    self._say(0, ())
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimedOut(
                        f"the daemon lent no place of {size_bytes} bytes in time: the ring has no room for it yet, "
                        "other clients come first, or the daemon does not answer (`tensorctl health`); allow more "
                        "time, or put less at once"
                    )
                self._wire.wait_for_bell(seen, left_s)
        finally:
            self._waiting.pop(here, None)

    def _is_awaited(self, left_bytes: int, size_bytes: int) -> bool:
        """Whether a put that needs more than `size_bytes` waits for a place of at most `left_bytes`."""
        return any(size_bytes < wanted <= left_bytes for wanted in [*self._waiting.values()])

    def _let_go_above(self, unused_bytes: int) -> None:
        """Lets go of the smallest grants until no more than this is unused. The daemon lends no more to a client whose
        put waits than that."""
        with self._lock:
            while self.left_bytes > unused_bytes and self._grants:
                self._drop(1)

    def granted(self, request: int, grants: Sequence[Granted], error: TensordError | None = None) -> None:
        """The daemon's answer to a request. For the connection, which raises `bells` afterwards."""
        if self.ended is not None:
            return
        self._memory.tidy()
        lent: list[tuple[int, int, Grant]] = []
        for each in grants:
            end = each.offset + each.size_bytes
            grant = Grant(each.number, each.offset, end, None)
            self._numbers[ref(grant, self._over.append)] = each.number
            # Without a pin, and beyond this memory, it goes back.
            try:
                grant.pin = self._memory.hold(each)
            except IndexError:
                error = error or LimitReached(
                    f"all {LANE_WORDS} words of this client's lane are taken by views and places: release leases, or "
                    "put fewer payloads at once"
                )
            if grant.pin is not None:
                lent.append((each.size_bytes, each.number, grant))
        with self._lock:
            self._grants += lent
            self._grants.sort()
            # Counted anew: an exception of a signal handler may have come between two steps of `take`.
            self.left_bytes = sum(left_bytes for left_bytes, _, _ in self._grants)
            self._low_bytes = self.left_bytes // 2
        if error is not None:
            if len(self._errors) >= ERRORS_MAX:
                self._errors.clear()
            self._errors[request] = error
        # Last: whoever waits for the answer finds the places, or the error.
        self._asked.pop(request, None)
        if request == self._ahead_request:
            self._ahead_request = 0

    def give_back(self) -> None:
        """Gives back all unused places: a large one has no room beside them. For the connection."""
        self._let_go_above(0)
        self._return()

    def rest(self) -> None:
        """Gives back what is more than twice the places taken since the last call: unused places are in the way of
        large ones. For the connection, once a second."""
        with self._lock:
            needed, self._taken = 2 * self._taken, 0
            self._drop(len(self._grants) - needed)
            # The next burst waits once for all its places.
            self._ahead = min(self._ahead, max(1, needed, self._ahead // 2))
            self._low_bytes = min(self._low_bytes, self.left_bytes // 2)
            if not needed:
                self._lately.clear()
        self._return()

    def _return(self) -> None:
        while self._over and self._say(0, ()):
            pass
        self._memory.tidy()

    @property
    def waiting(self) -> bool:
        """Whether a put waits for a place, or has waited in vain for an answer that the daemon owes still."""
        return bool(self._waiting or self._asked)

    def end(self, error: TensordError) -> None:
        """The connection is lost: nothing more is lent, and no put waits. A copy that is under way keeps its pin.

        Takes no lock, since a signal handler may close a client in the middle of a put.
        """
        self.ended = without_frames(error)
        # A put that takes a place of the former list has it for nothing.
        self._grants = []
        self.left_bytes = 0

    def _ask_ahead(self) -> None:
        try:
            with self._lock:
                if self._ahead_request:
                    return
                self._ahead_request, sizes = self._next_request(0)
            self._say(self._ahead_request, sizes, ahead=True)
        except BaseException:
            self._ahead_request = 0
            raise

    def _say(self, request: int, sizes: Sequence[int], timeout_s: float = 0.0, *, ahead: bool = False) -> bool:
        """Sends a request, with the grants that are over. Returns whether it was sent; if not, they go with the next
        one, also after an exception of a signal handler. Then they may go twice: the daemon ignores the second time."""
        over: list[ref[Grant]] = []
        sent = False
        try:
            if sizes:
                self._asked[request] = max(sizes)
            with suppress(IndexError):
                # One step of the interpreter, also if the last call raises.
                over.extend(islice(iter(self._over.popleft, None), GRANTS_MAX))
            sent = self._wire.ask_for_grants(
                request, sizes, [self._numbers[each] for each in over], timeout_s, ahead=ahead
            )
        finally:
            if not sent:
                self._asked.pop(request, None)
                self._over.extend(over)
                if request == self._ahead_request:
                    self._ahead_request = 0
        if sent:
            for each in over:
                self._numbers.pop(each, None)
        return sent

    def _next_request(self, first_bytes: int) -> tuple[int, list[int]]:
        """Request and sizes. The caller has the lock. `first_bytes`: what a put waits for; 0: nothing."""
        lately = self._lately
        least = min(lately, default=LEAST_BYTES)
        self._drop(bisect_left(self._grants, (least,)))
        sizes = [first_bytes] if first_bytes else []
        total_bytes = first_bytes
        for number in range(min(self._ahead, max(1, GRANTS_MAX - len(self._grants))) - len(sizes)):
            size_bytes = lately[-1 - number % len(lately)] if lately else LEAST_BYTES
            total_bytes += size_bytes
            if sizes and total_bytes > self._share_bytes:
                break
            sizes.append(size_bytes)
        return self._wire.next_request(), sizes

    def _drop(self, count: int) -> None:
        """Lets go of the smallest grants. The caller has the lock."""
        # `end`, which takes no lock, may have taken the list away since it was counted.
        grants = self._grants
        for _ in range(min(count, len(grants))):
            self.left_bytes -= grants.pop(0)[0]
