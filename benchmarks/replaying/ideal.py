"""A cache of an exact number of bytes, without fragmentation, that evicts by one of the store's policies.

Does not own: the policies; the ring, the index and scans, which real.py replays.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from replaying.counts import Counts
from replaying.traces import Request, Step, Trace
from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.leaf_first import leaf_first
from tensord.daemon.policy.replacement import Replacement
from tensord.shm.layout import KEY_BYTES

TAG: Final = b"replayed"
"""The namespace's."""


def key_of(block: int) -> bytes:
    """The key of a block: 32 bytes, the namespace's tag first."""
    return TAG + sha256(block.to_bytes(8, "little")).digest()[: KEY_BYTES - len(TAG)]


class Ideal:
    """The cached blocks, as one policy keeps them.

    As in the store, a block with cached children stays, and so do the ancestors of the block that a put adds. A put
    without room is refused. So is a block that the policy does not admit over its victim, and then all its descendants.
    """

    def __init__(self, trace: Trace, policy: Replacement, capacity_bytes: int, *, steps: bool = False) -> None:
        """`steps`: the policy receives the ends of agents' calls."""
        self._trace = trace
        self._policy = policy
        self._free_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._steps = steps
        self._span_of: list[int] = [0] * len(trace.sizes)
        self._block_of: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._spans_made = 0
        self.counts = Counts()
        self.evicted = 0

    def run(self) -> Counts:
        """Replays the whole trace."""
        for event in self._trace.events:
            if isinstance(event, Request):
                self.ask(event)
            elif self._steps and isinstance(event, Step):
                self.step(event)
        return self.counts

    def step(self, step: Step) -> None:
        self._policy.turn(step.agent, step.state, step.at)

    def ask(self, request: Request) -> None:
        """Counts the cached blocks of a request, uses them parents first, and stores the rest."""
        span_of, policy = self._span_of, self._policy
        blocks: list[int] = request.blocks.tolist()
        there = 0
        for block in blocks:
            if not span_of[block]:
                break
            there += 1
        self.counts.count(self._trace, request, blocks, there, [])
        path = [span_of[block] for block in blocks[:there]]
        for span in path:
            policy.accessed(span, request.at, request.agent)
        stays = set(path)
        parent = path[-1] if path else None
        before_bytes = sum(self._trace.sizes[block] for block in blocks[:there])
        for depth, block in enumerate(blocks[there:], there):
            parent = self._store(block, parent, depth, before_bytes, stays, request)
            before_bytes += self._trace.sizes[block]
            if parent is None:
                break

    def check_invariants(self) -> None:
        """Asserts that the policy knows exactly the cached blocks, and that they fit."""
        assert len(self._policy) == len(self._block_of)
        taken = sum(self._trace.sizes[block] for block in self._block_of.values())
        assert 0 <= self._free_bytes == self._capacity_bytes - taken

    def _store(
        self, block: int, parent: int | None, depth: int, before_bytes: int, stays: set[int], request: Request
    ) -> int | None:
        """The span of a block that was not cached; None if there is no room."""
        size_bytes, tokens = self._trace.sizes[block], self._trace.tokens[block]
        span = self._spans_made + 1
        new = Candidate(span, key_of(block), size_bytes, tokens, 0.0, depth, before_bytes, request.agent)
        if size_bytes > self._free_bytes and not self._make_room(new, stays):
            return None
        self._spans_made += 1
        self._span_of[block] = new.span_id
        self._block_of[new.span_id] = block
        self._free_bytes -= size_bytes
        self._policy.inserted(new, request.at)
        self._parent[span], self._children[span] = parent, 0
        if parent is not None:
            if not self._children[parent]:
                self._policy.may_go(parent, False)
            self._children[parent] += 1
        stays.add(new.span_id)
        return new.span_id

    def _make_room(self, new: Candidate, stays: set[int]) -> bool:
        sizes, block_of = self._trace.sizes, self._block_of
        lacking = new.size_bytes - self._free_bytes
        victims: list[int] = []
        if new.size_bytes <= self._capacity_bytes:
            parent, children = self._parent.__getitem__, self._children.__getitem__
            for span in leaf_first(self._policy.coldest(), self._policy.rank, parent, children):
                if span not in stays:
                    victims.append(span)
                    lacking -= sizes[block_of[span]]
                    if lacking <= 0:
                        break
        if lacking > 0 or (new.depth and not self._policy.admits(new, victims[-1])):
            return False
        for span in victims:
            self._policy.removed(span, evicted=True)
            above = self._parent.pop(span)
            del self._children[span]
            if above is not None:
                self._children[above] -= 1
                if not self._children[above]:
                    self._policy.may_go(above, True)
            block = block_of.pop(span)
            self._span_of[block] = 0
            self._free_bytes += sizes[block]
        self.evicted += len(victims)
        return True
