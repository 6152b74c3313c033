"""What the applications of a simulated host do: each action is a call of one random process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord.client.reading.lease import Lease
from tensord.client.reading.view import View
from tensord.errors import Corrupt, TensordError
from tensord.ipc.messages import control as messages

from .payloads import ALL, SEQUENCES, TAGS, asked, at, before, blocks, is_block, number_of, tag_of
from .process import Process

if TYPE_CHECKING:
    from .world import World


class Calls:
    """The calls of the processes of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance
        self.hits = self.matches = 0
        self._versions = 0

    def weights(self) -> dict[Callable[[], None], float]:
        """The actions that begin calls, with their weights."""
        return {
            self.put: 60,
            self.read: 30,
            self.let_go: 12,
            self.match: 8,
            self.ask: 8,
            self.claim: 8,
            self.wait: 6,
            self.learn: 4,
        }

    def number(self, process: Process, names: int = ALL) -> int:
        """Draws a key at the generation of its namespace that the process knows."""
        number = self.chance.randrange(names)
        return number + ALL * process.eras[tag_of(number)]

    def put(self) -> None:
        process = self.world.some(connected=True)
        if process is None:
            return
        if self.chance.random() < 0.15:
            numbers = {self.number(process) for _ in range(4)}
            self._put_many(process, sorted(n for n in numbers if not is_block(n) and before(n) is None))
            return
        path = [self.number(process)]
        if process.view is not None and self.chance.random() < 0.8:
            # In most cases begin at the first missing entry, as a client does that stores a sequence.
            while (parent := before(path[0])) is not None and not process.view.contains(at(parent)):
                path.insert(0, parent)
        claim = None
        if process.claims and self.chance.random() < 0.7:
            claim, number = self.chance.choice([*process.claims.items()])
            del process.claims[claim]
            path = [number]
        # Some put all that is missing, without waiting.
        for number in path if self.chance.random() < 0.3 else path[:1]:
            self._put(process, number, claim)

    def _put(self, process: Process, number: int, claim: int | None) -> None:
        self._versions += 1
        version = self._versions if not is_block(number) else 0
        ttl_s = self.chance.choice([None, None, 10.0])
        way = self.chance.choice(["put", "put", "put", "produced"])
        self.world.say("put", process=process.number, key=number, version=version, way=way)
        process.put(number, version, claim=claim, ttl_s=ttl_s, way=way)

    def _put_many(self, process: Process, numbers: list[int]) -> None:
        versions = {number: self._versions + at for at, number in enumerate(numbers, 1)}
        self._versions += len(numbers)
        self.world.say("put_many", process=process.number, versions=versions)
        process.put_many(versions)

    def learn(self) -> None:
        """A process reads the generations, as after a restart with the same arguments."""
        process = self.world.some(seeing=True)
        if process is not None:
            process.learn()

    def wait(self) -> None:
        """A process waits for one of its puts."""
        process = self.world.some(connected=True)
        if process is not None:
            process.wait(self.chance.choice([0.0, 0.1, 3.0]))

    def rest(self) -> None:
        process = self.world.some()
        if process is not None and not process.closed:
            process.rest()

    def read(self) -> None:
        """Reads entries by one of the calls, with or without a connection, and holds the payloads found."""
        process = self.world.some(seeing=True)
        if process is None or process.view is None:
            return
        view = process.view
        known = [*self.world.model.there] or [0]
        numbers = [self.chance.choice([self.chance.choice(known), self.number(process)]) for _ in range(4)]
        if self.chance.random() < 0.3:
            process.wait_for_own(numbers[0])
            if process.view is not view:
                return
        way = self.chance.choice(["get", "hold", "verified", "get_many"])
        leases: list[Lease | None]
        if way == "get_many":
            leases = list(view.get_many(np.frombuffer(b"".join(map(at, numbers)), np.uint8).reshape(-1, 32)))
        else:
            leases = [self._found(view, way, number) for number in numbers]
        for number, lease in zip(numbers, leases, strict=True):
            contained = view.contains(at(number))
            there = lease is not None or (self.world.damaged and contained)
            # The ring may have grown since it was mapped. A full lane then copies entries that lie outside the view.
            copied = there and not contained and not view.is_whole and lease is not None and lease.handle() is None
            assert contained == there or copied, f"key {number}: {way} and contains disagree"
            if lease is not None:
                self.hits += 1
                found = process.keep(number, lease)
                assert found == self.world.model.there[number], f"key {number}: version {found} is stale"

    def _found(self, view: View, way: str, number: int) -> Lease | None:
        try:
            found: Lease | None = getattr(view, way)(at(number))
        except Corrupt:
            assert self.world.damaged, f"key {number} is corrupt"
            return None
        return found

    def let_go(self) -> None:
        process = self.world.some()
        if process is not None:
            process.let_go()

    def match(self) -> None:
        """Asserts that a prefix match returns the blocks that a reader finds."""
        process = self.world.some(connected=True, seeing=True)
        daemon = self.world.daemon
        if process is None or process.wire is None or process.view is None or daemon is None:
            return
        if process.wire.number not in daemon.wires:
            return
        words, era = self.chance.choice(SEQUENCES), process.eras[TAGS[2]]
        query, tokens = asked(words, era)
        message = messages.MatchPrefix(process.next_id(), TAGS[2], 0, query.record_bytes)
        hidden = daemon.parts.spans.hidden
        before = {*hidden}
        matched = daemon.match(process.wire.number, message, query, tokens)
        if matched is None:
            return
        wanted = [at(number) for number in blocks(words, era)]
        # After the answer the same event may have begun a round of victims.
        there = [key for key in wanted if process.view.contains(key) or key in hidden.keys() - before]
        assert matched.blocks == wanted[: len(matched.blocks)]
        assert len(matched.blocks) <= len(there)
        # A block with a damaged record stays an entry, but no match finds the block.
        assert matched.blocks == there or self.world.damaged or daemon.parts.blocks.rebuilding
        self.matches += bool(there)

    def claim(self) -> None:
        """Requests a claim, renews it, abandons it, or forgets it."""
        process = self.world.some(connected=True)
        if process is None:
            return
        number = self.number(process, 5)
        held = [*process.claims]
        what = self.chance.choice(["claim", "claim", "renew", "abandon", "forget"])
        if what == "claim":
            if self.world.remote.objects and self.chance.random() < 0.5:
                number = number_of(self.chance.choice(sorted(self.world.remote.objects)))
            request = process.next_id()
            process.asked[request] = number
            self._send(process, messages.RequestClaim(request, at(number), self.chance.choice([0.0, 30.0])))
        elif held and what == "renew":
            self._send(process, messages.Renew(held))
        elif held and what == "abandon":
            token = self.chance.choice(held)
            process.claims.pop(token)
            error = messages.ErrorBody("ObjectTooLarge", "too large") if self.chance.random() < 0.3 else None
            self._send(process, messages.Abandon(token, error))
        elif held:
            process.claims.pop(held[0])

    def ask(self) -> None:
        process = self.world.some(connected=True)
        if process is None:
            return
        chance, request = self.chance, process.next_id()
        key = at(self.number(process))
        ring_bytes = self.world.daemon.ring_bytes if self.world.daemon is not None else 1 << 15
        tag = chance.choice(TAGS)
        make: list[Callable[[], Any]] = [
            lambda: messages.Evict(request, [key]),
            lambda: messages.Touch(request, [key]),
            lambda: messages.Pin(request, key, 5.0),
            lambda: messages.Unpin(request, key),
            lambda: messages.Limit(request, chance.choice([ring_bytes, ring_bytes, ring_bytes // 2])),
            lambda: messages.AgentTurn(
                request, "agent 1", chance.choice(["began", "tool_call", "turn_ended", "finished"])
            ),
            lambda: messages.Clear(request, None if chance.random() < 0.1 else tag),
            lambda: messages.Invalidate(request, tag, process.eras[tag]),
            lambda: messages.FetchRun(request, self._run(), chance.choice([0.0, 30.0])),
        ]
        [which] = chance.choices(make, [4, 4, 3, 3, 3, 3, 0.5, 0.7, 3])
        self._send(process, which())

    def _run(self) -> list[bytes]:
        """Keys to fetch: often of a chain, since an entry's number is near its parent's."""
        first = number_of(self.chance.choice(sorted(self.world.remote.objects))) if self.world.remote.objects else 0
        return [at(number) for number in range(first, first + self.chance.randint(1, 6))]

    def _send(self, process: Process, message: Any) -> None:
        self.world.say("asks", process=process.number, message=message)
        try:
            process.send(message)
        except TensordError:
            pass
