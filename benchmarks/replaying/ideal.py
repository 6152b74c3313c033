"""A cache of an exact number of bytes, without fragmentation, that evicts by one of the store's policies.

Owns: the columns of a store, as far as policies read them. Does not own: the policies; the ring, the index and scans,
which real.py replays. As in the store, a block with cached children stays, and so do the ancestors of the block that a
put adds. A put without room is refused; so is a block that the policy does not admit, and then all its descendants.
Puts and uses reach the policy in batches (of one request), and room is made for several puts at once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from replaying.counts import Counts
from replaying.keys import key_of
from replaying.traces import Request, Restart, Step, Trace
from tensord.daemon.replacement import POLICIES, Facts

BATCH_SHARE: Final = 256
"""A batch of victims is one in so many rows, from 1 to BATCH_MAX rows."""
BATCH_MAX: Final = 64
_KINDS: Final = {
    "digests": "u8",
    "sizes": "u8",
    "costs": "f4",
    "tokens": "u4",
    "owners": "u2",
    "agents": "u2",
    "depths": "u2",
    "befores": "u8",
    "parents": "u4",
    "children": "u4",
}


class Ideal:
    """The cached blocks, as one policy keeps them."""

    def __init__(self, trace: Trace, policy: str, capacity_bytes: int) -> None:
        self._trace = trace
        self._name = policy
        smallest = max(min(trace.sizes, default=1), 1)
        many = min(capacity_bytes // smallest, len(trace.sizes)) + 2
        self._columns: dict[str, np.ndarray[Any, Any]] = {name: np.zeros(many, kind) for name, kind in _KINDS.items()}
        self._policy = POLICIES[policy](Facts.of(self._columns.__getitem__))
        self._free = list(range(many - 1, 0, -1))
        self._free_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._row_of = [0] * len(trace.sizes)
        self._block_of = [0] * many
        self._order: dict[int, None] = {}
        """The rows in the order of their last uses."""
        self._puts: dict[int, None] = {}
        self._agents: dict[str, int] = {"": 0}
        self._digests = [xxh3_64_intdigest(key_of(block)) for block in range(len(trace.sizes))]
        self.counts = Counts()

    def step(self, step: Step) -> None:
        self._policy.turn(self._agent(step.agent), step.state, step.at)

    def restart(self, event: Restart) -> None:
        """Another policy takes over the rows and the history."""
        learned = list(self._policy.learned())
        self._policy = POLICIES[self._name](Facts.of(self._columns.__getitem__))
        by_use, by_put = np.array([*self._order], np.int64), np.array([*self._puts], np.int64)
        for _ in self._policy.recovering(by_use, by_put, np.zeros(len(self._block_of), np.uint16), event.at):
            pass
        self._policy.learn(learned)

    def ask(self, request: Request) -> None:
        """Counts the cached blocks of a request, uses them parents first, and stores the rest."""
        row_of = self._row_of
        blocks: list[int] = request.blocks.tolist()
        there = 0
        for block in blocks:
            if not row_of[block]:
                break
            there += 1
        self.counts.count(self._trace, request, blocks, there, [])
        agent = self._agent(request.agent)
        path = [row_of[block] for block in blocks[:there]]
        self._policy.used(path, request.at, agent)
        for row in path:
            self._order[row] = self._order.pop(row)
        parent = path[-1] if path else 0
        for block in blocks[there:]:
            row = self._store(block, parent, agent, request)
            if not row:
                break
            parent = row
        self._policy.batch_ended(request.at)

    def _store(self, block: int, parent: int, agent: int, request: Request) -> int:
        """The row of a block that was not cached; 0 if there is no room."""
        size, tokens, columns = self._trace.sizes[block], self._trace.tokens[block], self._columns
        if size > self._free_bytes and not self._room(block, parent, agent, request):
            return 0
        row = self._free.pop()
        self._free_bytes -= size
        columns["digests"][row], columns["sizes"][row], columns["tokens"][row] = self._digests[block], size, tokens
        columns["agents"][row], columns["parents"][row], columns["children"][row] = agent, parent, 0
        if parent:
            columns["depths"][row] = min(int(columns["depths"][parent]) + 1, 0xFFFF)
            columns["befores"][row] = columns["befores"][parent] + columns["sizes"][parent]
            columns["children"][parent] += 1
        else:
            columns["depths"][row] = columns["befores"][row] = 0
        self._row_of[block], self._block_of[row] = row, block
        self._order[row] = self._puts[row] = None
        self._policy.was_put(row)
        return row

    def _room(self, block: int, parent: int, agent: int, request: Request) -> bool:
        """Evicts until a block fits."""
        size, policy = self._trace.sizes[block], self._policy
        if size > self._capacity_bytes:
            return False
        policy.batch_ended(request.at)
        # The parent stays as if it had the child already; its ancestors have children.
        self._columns["children"][parent] += 1
        tokens = self._trace.tokens[block]
        admitted = not parent or policy.admits(self._digests[block], size, parent, 0.0, tokens, agent)
        while admitted and size > self._free_bytes:
            victims = policy.victims(max(1, min(BATCH_MAX, len(self._order) // BATCH_SHARE)))
            if not victims:
                break
            self._evict(victims)
        self._columns["children"][parent] -= 1
        return size <= self._free_bytes

    def _evict(self, victims: list[int]) -> None:
        columns = self._columns
        for row in victims:
            columns["children"][columns["parents"][row]] -= bool(columns["parents"][row])
        self._policy.removed(victims, evicted=True)
        for row in victims:
            block = self._block_of[row]
            self._row_of[block] = 0
            self._free_bytes += self._trace.sizes[block]
            del self._order[row], self._puts[row]
        self._free += victims

    def _agent(self, name: str) -> int:
        return self._agents.setdefault(name, len(self._agents) + 1)
