"""A put: take a place, copy, record. One function, in its caller's thread. And the arrays of `reserve`.

    packed tree ─ Arena.take ─ write: one copy of each leaf ─ checksum ─ Submissions.add ─ bell, if the daemon sleeps

Owns: the arrays of a reservation, which are this process's alone until a commit copies them. Does not own: the state of
the steps, which has owners of its own.

Invariants: a record is written after its whole payload. The grant is held until then. An exception at any moment, also
one that a signal handler raises, leaves bytes that no record names, and nothing that has to be mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from ...errors import NotEnoughMemory, ObjectTooLarge, TensordError, TimedOut, Unavailable
from ...shm.lanes.records import NO_KEY, Submissions, agent_number
from ...shm.payloads.packing import Whole, pack_spec
from ...shm.payloads.recipe import recipe
from ...shm.ring.layout import QUEUE_RECORDS, SPAN_HEADER_BYTES
from ..arguments.put_options import PutOptions
from ..threads.of_process import OfThisProcess
from .arena import Arena
from .memory import WritableMemory
from .outcomes import Outcomes, Put, PutState
from .wire import Wire

CHECKED_BYTES_MAX: Final = 128 << 10
"""Payloads up to this size are summed here, while they are in the processor's cache: 1.3 µs for 64 KB. A sum of 1 MB
takes 0.6 of its copy; the daemon sums larger ones when it has time."""

_sum = xxhash.xxh3_64_intdigest


class PutPayload(Protocol):
    """What is put: a tree header, and what writes the whole payload, header included."""

    @property
    def header(self) -> bytes: ...

    @property
    def payload_bytes(self) -> int: ...

    def write(self, memory: memoryview, start: int) -> None:
        """Writes the payload to byte `start` of `memory`, a multiple of 64."""
        ...


class Writer:
    """Puts over one connection. Thread-safe; threads do not wait for each other's copies."""

    def __init__(
        self,
        memory: WritableMemory,
        arena: Arena,
        submissions: Submissions,
        outcomes: Outcomes,
        wire: Wire,
        object_bytes_max: int = 1 << 48,
    ) -> None:
        self.arena, self.outcomes = arena, outcomes
        self._memory = memory
        self._bytes = memory.bytes
        self.submissions = submissions
        self.wire = wire
        self._object_bytes_max = object_bytes_max

    def put(self, put: Put, payload: PutPayload, options: PutOptions, deadline: float) -> None:
        """Writes a payload and its record, with checked options. Returns once both are written, or the put has ended.
        `deadline`: by time.monotonic, for a place and for room in the queue."""
        tokens, ttl_s, claim, cost_ms, agent, prefix_bytes, parent = options
        if agent:
            self.wire.name_agent(agent)
        payload_bytes = payload.payload_bytes
        try:
            if payload_bytes > self._object_bytes_max:
                raise too_large(payload_bytes, self._object_bytes_max)
            size_bytes = SPAN_HEADER_BYTES + (payload_bytes + 63 & -64)
            grant, offset = self.arena.take(size_bytes) or self.arena.wait_for(size_bytes, deadline)
            memory, start = self._bytes, offset + SPAN_HEADER_BYTES
            if payload_bytes > CHECKED_BYTES_MAX:
                # It takes as long to wake the daemon as to copy 1 MB.
                self.wire.ring_to_wait()
            payload.write(memory, start)
        except TensordError as error:
            put.settle(state_for(error), error)
            return
        checksum = _sum(memory[start : start + payload_bytes]) if payload_bytes <= CHECKED_BYTES_MAX else 0
        submissions = self.submissions
        fields = (
            put.key, offset, payload_bytes, checksum, claim or 0, parent or NO_KEY, cost_ms, ttl_s or 0.0, grant.number,
            len(payload.header), tokens, prefix_bytes, agent_number(agent) if agent else 0, 0,
        )  # fmt: skip
        number = submissions.add(*fields) or self._added(fields, deadline)
        if number:
            self.outcomes.note(put, number)
        else:
            late = TimedOut(f"the daemon did not take the record of the put in time, after {QUEUE_RECORDS} others")
            put.settle("lost", self.outcomes.ended or late)
        if submissions.rings and self.wire.ring_bell():
            submissions.rang()

    def end(self, error: TensordError) -> None:
        """The connection is lost. For the connection, which raises `bells` afterwards."""
        self.arena.end(error)
        self.submissions.end()
        self.outcomes.end(error)

    def disown(self) -> None:
        """In the child of a fork: the puts belong to the parent."""
        self.submissions.disown()
        self.outcomes.disown()

    def _added(self, fields: tuple[object, ...], deadline: float) -> int:
        """The number of a record for which the queue had no room at first; 0 without room in time."""
        submissions = self.submissions
        while self.outcomes.ended is None:
            if submissions.rings and self.wire.ring_bell():
                submissions.rang()
            if not self.outcomes.wait_for(submissions.written - QUEUE_RECORDS + 1, deadline):
                return 0
            if number := submissions.add(*fields):
                return number
        return 0


def state_for(error: TensordError) -> PutState:
    """The state of a put that has ended with `error`."""
    return "lost" if isinstance(error, Unavailable) else "refused"


def too_large(payload_bytes: int, most: int) -> ObjectTooLarge:
    """The error of a payload over what the daemon takes."""
    return ObjectTooLarge(
        f"the payload has {payload_bytes} bytes, the daemon takes at most {most}: raise ring_bytes, and "
        "object_bytes_max if it is set, or split the payload over several keys"
    )


Commit = Callable[[bytes, PutPayload, PutOptions, bool, float | None], Put]
"""Puts a payload: key, payload, options, whether to wait, time limit in seconds."""


class Reservation(OfThisProcess):
    """Arrays to be filled in place and then committed.

    `tree` has writable numpy arrays for leaves. Write them until `commit`; what is written later reaches no entry.

    Example:
        >>> reserved = cache.reserve({"hidden": tensord.Spec((576, 64), "float32")})
        >>> reserved.tree["hidden"][:] = 1.0
        >>> reserved.commit(key, tokens=576, wait=True).state
        'stored'
    """

    __slots__ = ("__weakref__", "_commit", "_payload", "tree")
    _instead = "commit it here; another process reads the entry by its key"

    def __init__(self, spec: Any, depth_max: int, object_bytes_max: int, commit: Commit) -> None:
        packed = pack_spec(spec, depth_max)
        if packed.payload_bytes > object_bytes_max:
            raise too_large(packed.payload_bytes, object_bytes_max)
        try:
            memory = np.empty(packed.payload_bytes, np.uint8)
        except MemoryError:
            raise NotEnoughMemory(f"this process has no memory for a payload of {packed.payload_bytes} bytes") from None
        packed.write(memory.data, 0)
        self.tree = recipe(packed.header).view(memory)
        self._payload: Whole | None = Whole(packed.header, memory)
        self._commit = commit

    def commit(
        self,
        key: bytes,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parent: bytes | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        """Puts the arrays as the payload of `key`. Arguments, result and errors as for `Client.put`.

        Raises:
            ValueError: the reservation was committed or abandoned before.
        """
        payload, self._payload, self.tree = self._payload, None, None
        if payload is None:
            raise ValueError("this reservation was committed or abandoned before; call reserve again")
        options = PutOptions(tokens, ttl_s, cost_ms=cost_ms, agent=agent, parent=parent)
        return self._commit(key, payload, options, wait, timeout_s)

    def abandon(self) -> None:
        """Forgets the arrays."""
        self._payload = self.tree = None
