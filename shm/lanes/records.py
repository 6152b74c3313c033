"""The submission queue of a lane: puts as records of a fixed size, from one client to the daemon, without a message.

    lane segment: … │ head │ … │ QUEUE_RECORDS records of RECORD_BYTES │        index segment: … │ settled, per lane │

A client writes a payload into memory that the daemon lent to it (a grant), then a record, then the queue's head. The
daemon reads the records from its tail to the head, carries them out, and writes the number of the last one into the
lane's `settled` word. It rings no bell and sends no message for a put that was stored; a refusal is a message.

Invariants: a record's number is one more than that of the record before it. The client reuses a record's place only
after `settled` has reached its number. The daemon reads with preadv, so a truncated lane is a short read and no SIGBUS;
whatever a client writes, a batch has at most QUEUE_RECORDS records, and only that client's puts suffer.
"""

from __future__ import annotations

import os
from struct import Struct
from threading import RLock
from typing import Final
from zlib import crc32

from ..ring.layout import NO_KEY as NO_KEY
from ..ring.layout import QUEUE_AT, QUEUE_BYTES, QUEUE_RECORDS, RECORD_BYTES

RECORD: Final = Struct("<Q32sQQQQ32sddIIIIII")
"""number, key, offset, payload bytes, checksum, claim, parent, cost in ms, time to live in s, grant, tree bytes,
tokens, prefix bytes, agent, flags. Numbers of 0 and keys of zeros stand for none."""
assert RECORD.size == RECORD_BYTES
SUBMITTED_AT: Final = 26
"""Where a client says, in words from the lane's beginning, the number of its last record."""
WAITS_AT: Final = 28
"""Where it says likewise up to which record it waits; 0: nobody waits. The daemon rings once when it is settled."""
AWAKE, SLEEPS, NAPS = 0, 1, 2
"""The values of the word `asleep`: the daemon needs no bell; one for each record; one of a client that waits, and for
every NAP_RECORDS-th record, so that a burst of puts does not end its nap late."""
NAP_RECORDS: Final = 8

_HEAD = Struct("<Q")


def agent_number(name: str) -> int:
    """What a record says of an agent: the CRC-32 of its name; 0 without a name, and 1 for a CRC of 0."""
    return (crc32(name.encode("utf-8", "surrogatepass")) or 1) if name else 0


def first_number(records: memoryview) -> int:
    """The number of the first of these records."""
    number: int = _HEAD.unpack_from(records)[0]
    return number


class Submissions:
    """The client's end. Thread-safe.

    Args:
        words: the lane as native u64 words; `head_at` is the head's word in it.
        records: the queue's bytes in the lane.
        settled: the daemon's words, of which `lane` is this lane's.
        asleep: the word that says whether the daemon waits for a bell.
    """

    __slots__ = ("_asleep", "_head", "_head_at", "_lane", "_lock", "_records", "_rung", "_settled", "_words")
    _settled: memoryview | dict[int, int]

    def __init__(
        self, words: memoryview, head_at: int, records: memoryview, settled: memoryview, lane: int, asleep: memoryview
    ) -> None:
        self._words, self._head_at, self._records = words, head_at, records
        self._settled, self._lane, self._asleep = settled, lane, asleep
        self._head: int = words[head_at]
        self._rung = 0
        # Reentrant: a signal handler may close the client.
        self._lock = RLock()

    @property
    def settled(self) -> int:
        """The number of the last record that the daemon has carried out."""
        number: int = self._settled[self._lane]
        return number

    @property
    def written(self) -> int:
        """The number of the last record."""
        return self._head

    @property
    def room(self) -> int:
        """Records that can be added now."""
        return QUEUE_RECORDS - (self._head - self.settled)

    @property
    def rings(self) -> bool:
        """Whether the daemon has to be woken for what was added: it is not, and no bell is on its way."""
        asleep = self._asleep[0]
        return bool(
            asleep
            and (asleep == SLEEPS or self._head % NAP_RECORDS == 0)
            # The daemon does not sleep again before it has carried out what it was woken for.
            and self._rung <= self._settled[self._lane]
        )

    def rang(self) -> None:
        """A bell was sent."""
        self._rung = self._head

    def end(self) -> None:
        """Adds nothing any more: the connection is lost. Afterwards another object may write into the queue."""
        with self._lock:
            self.disown()

    def disown(self) -> None:
        """As `end`, in the child of a fork, where nobody has the lock that a thread of the parent had."""
        self._lock = RLock()
        self._settled = {self._lane: -(1 << 63)}
        # Nothing here keeps the mappings.
        self._words = self._records = self._asleep = memoryview(bytearray(8 * (self._head_at + 1))).cast("Q")

    def add(self, *fields: object) -> int:
        """Adds a record of these fields, without the number. The payload is whole before this call. Returns the
        record's number; 0 without room."""
        with self._lock:
            number = self._head + 1
            if number - self._settled[self._lane] > QUEUE_RECORDS:
                return 0
            RECORD.pack_into(self._records, (number - 1) % QUEUE_RECORDS * RECORD_BYTES, number, *fields)
            # SYNC POINT: the record is stored before the head. x86-64 keeps stores in order; ARM needs a release store.
            # The head is stored before `asleep` is loaded (`rings`), which x86-64 may reorder: the daemon's fence
            # between "store asleep" and "look at the heads once more" makes both orders safe.
            self._words[self._head_at] = self._head = number
            return number


class SubmissionReader:
    """The daemon's end of one lane's queue. `tail`: the number of the last record that was read."""

    __slots__ = ("_fd", "_scratch", "_word", "tail")

    def __init__(self, fd: int) -> None:
        """The caller keeps `fd`, of the lane. Records of before are skipped: a client that attaches again has lost
        them."""
        self._fd = fd
        self._word = bytearray(8)
        self._scratch: memoryview | None = None
        self.tail = 0
        self.tail = self.head()

    def head(self) -> int:
        """The number of the last record that was written; that of `tail` if the lane was truncated."""
        if os.preadv(self._fd, [self._word], SUBMITTED_AT * 8) < 8:
            return self.tail
        return int.from_bytes(self._word, "little")

    def waits_for(self) -> int:
        """Up to which record the client waits; 0: it does not wait. Read it after `settled` was stored."""
        whole = os.preadv(self._fd, [self._word], WAITS_AT * 8) == 8
        return int.from_bytes(self._word, "little") if whole else 0

    def take(self, most: int = QUEUE_RECORDS) -> memoryview | None:
        """Up to `most` records that were not taken before, in one piece; None if there are none. The memory is valid
        until the next call, and the caller may change it. Records at the end of the queue come without those at its
        beginning: call it again."""
        tail = self.tail
        fresh = self.head() - tail
        if fresh <= 0:
            return None
        if self._scratch is None:
            self._scratch = memoryview(bytearray(QUEUE_BYTES))
        first = tail % QUEUE_RECORDS
        count = min(fresh, most, QUEUE_RECORDS - first)
        size = count * RECORD_BYTES
        taken = self._scratch[:size]
        whole = os.preadv(self._fd, [taken], QUEUE_AT + first * RECORD_BYTES) == size
        # What a truncated lane does not have is lost. Nobody waits for it.
        self.tail = tail + (count if whole else fresh)
        return taken if whole else None
