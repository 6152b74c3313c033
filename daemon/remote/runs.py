"""Runs: keys in order that the daemon fetches together for one client, such as the blocks of one sequence.

    FetchRun ─ worth it? ─ each key that the store has into the ring (`fetches`) → all ended → Counted

Owns: the answers of runs. Does not own the fetches of their keys.

A run ends at the first key that the store does not have: the entries after it may have no parent in the ring. Keys that
are sought already are waited for, and not sought again.

Invariants: every FetchRun is answered once, if its client stays. Of all runs, at most RUN_KEYS_MAX keys are sought at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Final

from ...ipc.messages import control as messages
from ...shm.index.keys import generation_of
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..core.outbox import StoreOutbox
from ..store.table import RowTable
from .fetches import UNKNOWN_S, Fetches
from .link import RemoteLink

RUN_KEYS_MAX: Final = 40
"""Keys of all runs that are sought or read at once."""


@dataclass(slots=True, eq=False)
class AskedRun:
    """One FetchRun of a client. `waits_for`: the number of its keys that are being fetched."""

    client: int
    request: messages.FetchRun
    waits_for: int


class Runs:
    """The runs of one store."""

    def __init__(
        self,
        table: RowTable,
        link: RemoteLink,
        fetches: Fetches,
        outbox: StoreOutbox,
    ) -> None:
        self._table = table
        self._link = link
        self._fetches = fetches
        self._outbox = outbox

    def begin(self, client: int, uid: int, request: messages.FetchRun, now: float) -> None:
        """Seeks the missing keys of a client, or answers at once."""
        wanted = self._wanted(request.keys)
        run = AskedRun(client, request, len(wanted))
        under_way = [fetch for key in wanted if (fetch := self._fetches.of(key)) is not None]
        own = [key for key in wanted if self._fetches.of(key) is None]
        for_s = self._worth(own, request.within_s, now) if own else 0.0
        if own and for_s <= 0:
            # What is sought already is found without this client.
            run.waits_for = 0
            self._answer(run)
            return
        for fetch in under_way:
            fetch.then.append(partial(self._ended_one, run))
        if own:
            self._fetches.run(own, uid, now + for_s, now, partial(self._ended_one, run))
        if not wanted:
            self._answer(run)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self._fetches.run_keys <= RUN_KEYS_MAX

    def _wanted(self, keys: list[bytes]) -> list[bytes]:
        """The missing keys, of the namespace and generation of the first one."""
        first = keys[0] if keys else b""
        alike = takewhile(
            lambda key: (
                key[:NAMESPACE_TAG_BYTES] == first[:NAMESPACE_TAG_BYTES] and generation_of(key) == generation_of(first)
            ),
            dict.fromkeys(keys),
        )
        missing = (key for key in alike if key not in self._table.by_key)
        return [*islice(missing, max(0, RUN_KEYS_MAX - self._fetches.run_keys))]

    def _worth(self, keys: list[bytes], within_s: float, now: float) -> float:
        """How long a client may wait for the store; 0 if it is better not to ask."""
        if not self._link.breaker.closed or not all(map(self._fetches.may_be_sought, keys)):
            return 0.0
        of_one = self._link.costs.of(keys[0][:NAMESPACE_TAG_BYTES]) or UNKNOWN_S
        cost_s = within_s or of_one * len(keys)
        for_s = self._fetches.patience_s(cost_s, now)
        if for_s <= 0:
            self._fetches.declined(len(keys))
        return for_s

    def _ended_one(self, run: AskedRun) -> None:
        run.waits_for -= 1
        if not run.waits_for:
            self._answer(run)

    def _answer(self, run: AskedRun) -> None:
        stored = self._table.by_key
        count = sum(1 for _ in takewhile(lambda key: key in stored, run.request.keys))
        self._outbox.send(run.client, messages.Counted(run.request.id, count))
