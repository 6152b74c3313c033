"""Ends many entries in slices, for Clear and Invalidate; raises the generation of a namespace.

Owns the jobs in progress. A job ends the entries that were published before its request, and their descendants, SLICE
at a time, so that no event takes longer than one slice. The answer follows the last slice. Does not own how an entry
ends (`removals`).

Invariant: the new generation is in the index segment (`shm.index.generations`) before the first entry of the old
generation ends, and before the answer is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...ipc.messages import control as messages
from ...shm.index.generations import GenerationWriter
from ..claims.claims import NOBODY
from ..claims.quotas import Quotas
from ..forms.outbox import StoreOutbox
from ..store.entries import Entries
from ..store.table import LIVE, VICTIM
from .removals import SLICE, RemovalProgress, Removals

Array = np.ndarray[Any, Any]

Select = Callable[[Array | slice], Array]
"""Which of some rows are to end, (n,) bool."""

_NO_ROWS: Final = np.empty(0, np.int64)


@dataclass(slots=True)
class _Sweep:
    """`select`: None if no entry is left to end. `rows`: those that it had selected when the job began, of which `at`
    were looked at; None before that."""

    client: int
    tag: bytes | None
    select: Select | None
    asked_at: float
    event: str
    progress: RemovalProgress
    answer: Callable[[int], messages.Answer]
    rows: Array | None = None
    at: int = 0

    @property
    def walked(self) -> bool:
        return self.rows is not None and self.at >= len(self.rows)


@dataclass(eq=False, repr=False)
class Sweeps:
    """The jobs, in order of request."""

    _entries: Entries
    _generations: GenerationWriter
    _removals: Removals
    _outbox: StoreOutbox
    _quotas: Quotas

    def __post_init__(self) -> None:
        self._states: Array = np.frombuffer(self._entries.table.states, np.uint8)
        self._names = self._entries.table.column("namespaces")
        self._jobs: deque[_Sweep] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def clear(self, client: int, request: messages.Clear) -> None:
        """Ends the entries of one namespace, or all entries. Answered by Counted."""
        select = self._within(request.namespace)
        self._begin(client, request.namespace, select, "clear", "cleared", lambda n: messages.Counted(request.id, n))

    def invalidate(self, client: int, request: messages.Invalidate) -> bool:
        """Raises the namespace's generation and ends its entries, unless another client has raised it meanwhile.

        Answered by Generation.

        Returns:
            Whether the generation was raised.

        Raises:
            LimitReached: too many namespaces, in all or of the uid, would be invalidated, or the generation is the last
                possible one.
        """
        tag, generations = request.namespace, self._generations
        known = generations.current(tag)
        is_new = request.generation >= known
        raised = request.generation + 1 if is_new else known
        select = None
        if is_new:
            # The daemon follows an invalidation on another host.
            uid = self._quotas.own_uid if client == NOBODY else self._outbox.clients[client].uid
            if tag not in generations and client != NOBODY:
                self._quotas.admit("namespaces", uid, generations.of_uid[uid])
            generations.raise_to(tag, raised, uid)
            self._entries.tenants.invalidated.add(tag)
            select = self._within(tag)
        # Without a new generation no entry is left to end, but the earlier job may be running, and is answered first.
        self._begin(
            client, tag, select, "invalidate", "invalidated", lambda n: messages.Generation(request.id, raised, n)
        )
        return is_new

    def advance(self) -> None:
        """Ends the next slice, once the descendants of the last slice have ended."""
        if not self._jobs or self._jobs[0].walked or self._removals.ending:
            return
        job = self._jobs[0]
        if job.select is None:
            job.rows = _NO_ROWS
            return
        if job.rows is None:
            # 3 ms for a million rows.
            job.rows = np.flatnonzero(job.select(slice(None)))
        rows = job.rows[job.at : job.at + SLICE]
        job.at += SLICE
        # Meanwhile it may have ended, and the row be another entry's.
        rows = rows[job.select(rows)]
        rows = rows[self._entries.details.created(rows, self._outbox.now) <= job.asked_at]
        self._removals.end(rows.tolist(), job.progress)

    def answer(self) -> None:
        """Answers the first job, if it has ended."""
        if not self._jobs or not self._jobs[0].walked or self._jobs[0].progress.waiting:
            return
        job = self._jobs.popleft()
        ended = job.progress.ended
        self._outbox.send(job.client, job.answer(ended))
        tag = None if job.tag is None else job.tag.hex()
        self._outbox.announce(job.event, client=job.client, namespace=tag, count=ended)

    def _within(self, tag: bytes | None) -> Select:
        """Selects the entries of a namespace, victims included; of any, without a tag."""
        number_of = self._entries.tenants.number_of
        name = -1 if tag is None else number_of.get(tag, -1)

        def within(rows: Array | slice) -> Array:
            states = self._states[rows]
            stored: Array = (states == LIVE) | (states == VICTIM)
            if tag is not None:
                # Its last entry may have ended meanwhile, and the number be another namespace's.
                stored &= self._names[rows] == (name if number_of.get(tag) == name else -1)
            return stored

        return within

    def _begin(
        self,
        client: int,
        tag: bytes | None,
        select: Select | None,
        event: str,
        reason: str,
        answer: Callable[[int], messages.Answer],
    ) -> None:
        self._jobs.append(_Sweep(client, tag, select, self._outbox.now, event, RemovalProgress(reason), answer))
        if len(self._jobs) == 1:
            self.advance()
