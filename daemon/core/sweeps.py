"""Ends many entries in slices, for Clear, Invalidate and EvictPrefixes; raises the generation of a namespace.

Owns the jobs in progress. A job ends the entries that were published before its request, and their descendants, SLICE
at a time, so that no event takes longer than one slice (2 to 3 ms). The answer follows the last slice. Does not own how
an entry ends (`expiry`).

Invariant: the new generation is in the index segment (`shm.generations`) before the first entry of the old generation
ends, and before the answer is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...ipc import messages
from .claims import NOBODY
from .entries import SpanEntry
from .expiry import Expiry, RemovalProgress
from .outbox import StoreOutbox
from .quotas import Quotas
from .span_table import SpanTable

SLICE: Final = 256
"""Entries that one event ends: 2 to 3 ms."""


@dataclass(slots=True)
class _Sweep:
    """`first(n)`: up to n of the entries to end, oldest first."""

    client: int
    tag: bytes | None
    first: Callable[[int], list[SpanEntry]]
    event: str
    ending: RemovalProgress
    answer: Callable[[int], messages.Answer]
    walked: bool = False


class Sweeps:
    """The jobs, in order of request."""

    def __init__(self, memory: SpanTable, expiry: Expiry, outbox: StoreOutbox, quotas: Quotas) -> None:
        self._memory = memory
        self._expiry = expiry
        self._outbox = outbox
        self._quotas = quotas
        self._jobs: deque[_Sweep] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def clear(self, client: int, request: messages.Clear) -> None:
        """Ends the entries of one namespace, or all entries. Answered by Counted."""
        self._begin(client, request.namespace, "clear", "cleared", lambda n: messages.Counted(request.id, n))

    def invalidate(self, client: int, request: messages.Invalidate) -> bool:
        """Raises the namespace's generation and ends its entries, unless another client has raised it meanwhile.

        Answered by Generation.

        Returns:
            Whether the generation was raised.

        Raises:
            LimitReached: namespaces_max or the uid's share of it would be exceeded, or the generation is the last
                possible one.
        """
        tag, generations = request.namespace, self._memory.index.generations
        known = generations.current(tag)
        is_new = request.generation >= known
        raised = request.generation + 1 if is_new else known
        if is_new:
            # The daemon follows an invalidation on another host.
            uid = self._quotas.own_uid if client == NOBODY else self._outbox.clients[client].uid
            if tag not in generations and client != NOBODY:
                self._quotas.admit("namespaces", uid, generations.of_uid[uid])
            generations.raise_to(tag, raised, uid)
        self._begin(
            client,
            tag,
            "invalidate",
            "invalidated",
            lambda n: messages.Generation(request.id, raised, n),
            # No entry is left to end, but the earlier job may still be running, and is answered first.
            None if is_new else lambda most: [],
        )
        return is_new

    def evict_prefixes(self, client: int, request: messages.EvictPrefixes) -> None:
        """Ends the blocks of cached sequences in one namespace, and no other entries. Answered by Counted."""
        memory, up_to = self._memory, self._memory.entries.last_sequence
        self._begin(
            client,
            request.namespace,
            "evict_prefixes",
            "cleared",
            lambda n: messages.Counted(request.id, n),
            lambda most: memory.sequences.first_blocks(request.namespace, up_to, most),
        )

    def advance(self) -> None:
        """Ends the next slice, once the descendants of the last slice have ended."""
        if not self._jobs or self._jobs[0].walked or self._expiry.ending:
            return
        job = self._jobs[0]
        entries = job.first(SLICE)
        for entry in entries:
            self._expiry.end(entry, job.ending)
        job.walked = len(entries) < SLICE

    def answer(self) -> None:
        """Answers the first job, if it has ended."""
        if not self._jobs or not self._jobs[0].walked or self._jobs[0].ending.waiting:
            return
        job = self._jobs.popleft()
        ended = job.ending.ended
        self._outbox.send(job.client, job.answer(ended))
        tag = None if job.tag is None else job.tag.hex()
        self._outbox.announce(job.event, client=job.client, namespace=tag, count=ended)

    def _begin(
        self,
        client: int,
        tag: bytes | None,
        event: str,
        reason: str,
        answer: Callable[[int], messages.Answer],
        first: Callable[[int], list[SpanEntry]] | None = None,
    ) -> None:
        entries, up_to = self._memory.entries, self._memory.entries.last_sequence
        first = first or (lambda most: entries.first(tag, up_to, most))
        self._jobs.append(_Sweep(client, tag, first, event, RemovalProgress(reason, announce=False), answer))
        if len(self._jobs) == 1:
            self.advance()
