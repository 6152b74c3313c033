"""Clients of a store with a remote store behind it. The test plays the remote store, and the daemon around the room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from tensord.daemon.claims.claims import NOBODY, ClaimTable, Verdict
from tensord.daemon.core.effects import (
    AskGenerations,
    RaiseGeneration,
    ReadRemote,
    RemoteTurned,
    RemoveRemote,
    SaveRemote,
    Seek,
    SeekRun,
    Send,
    WithdrawClaim,
)
from tensord.daemon.core.events import (
    ClaimWithdrawn,
    GenerationRaised,
    GenerationsTold,
    RemoteFound,
    RemoteRead,
    RemoteSaved,
    RunSought,
    Sought,
)
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.outbox import StoreClient, StoreOutbox
from tensord.daemon.remote.remote import Remote, RemoteEvent
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.store.grants import LentGrant
from tensord.errors import StoreFull, TensordError, TierUnavailable
from tensord.ipc import messages
from tensord.shm.generations import GenerationWriter
from tensord.shm.keys import generation_of, make_key
from tensord.shm.layout import SPAN_HEADER_BYTES, span_bytes
from tensord.shm.records import NO_KEY

from ..store.rows import RowStore

REMOTE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True, "remote_queue_bytes": 1000}
FOUND = RemoteFound(64, 16, tokens=3, cost_ms=8.0)
SPAN = span_bytes(64)


def key(number: int, tag: bytes = b"namespac", generation: int = 0) -> bytes:
    """A key that is told from others by its number."""
    return make_key(tag, number.to_bytes(8, "little") * 3, generation)


class RemoteStand:
    """One host. Its remote store is `remote`, and does what the test says."""

    def __init__(self, ring_bytes: int = 1 << 16, **limits: Any) -> None:
        self.limits = StoreLimits(
            **{"ring_bytes": ring_bytes, "max_bytes": ring_bytes, "max_entries": 500, "object_bytes_max": 1 << 30}
            | limits
        )
        self.store = store = RowStore(ring_bytes)
        self.now = 0.0
        self.outbox = StoreOutbox(StoreCounters())
        self.claims = ClaimTable(10.0, 120.0, 1024, 1)
        self.generations = GenerationWriter(memoryview(store.index_memory), store.geometry)
        store.commits._is_past = self.is_past
        store.tenants.invalidated = AllTags()
        self.own = store.client(NOBODY, 0)
        self.room = Remote(
            store.table,
            store.slots,
            store.tenants,
            self.own,
            self,
            self.commit_own,
            self.generations,
            self.raise_generation,
            self.claims,
            self.outbox,
            self.limits,
        )
        self.remote: dict[bytes, RemoteFound] = {}
        """What is in the remote store."""
        self.others: dict[bytes, float] = {}
        """When another host has claimed a key there."""
        self.withdrawn: list[bytes] = []
        self.remote_generations: dict[bytes, int] = {}
        self.no_room: TensordError | None = None
        """Why no place is lent."""
        self.holds_places = False
        """Whether places are lent by the test, with `lend`, and not at once."""
        self.places: deque[Callable[[], None]] = deque()
        self.seeks: deque[Seek] = deque()
        self.runs: deque[SeekRun] = deque()
        self.reads: deque[ReadRemote] = deque()
        self.writes: deque[tuple[SaveRemote | RemoveRemote, bytes]] = deque()
        """Writes to the remote store, with the bytes that each must find in the ring."""
        self.generation_requests: deque[AskGenerations | RaiseGeneration] = deque()
        self.turned: dict[str, list[str]] = {"store": [], "writes": [], "removals": [], "generations": []}
        """Why the store was left alone, and the like; empty when it served again."""
        self.answers: dict[int, list[Any]] = {}
        for client in (1, 2, 3):
            self.answers[client] = []
            self.outbox.clients[client] = StoreClient(1000 + client, f"client {client}")

    # ---- the daemon around the room

    def is_past(self, name: bytes) -> bool:
        return self.generations.is_past(name)

    def raise_generation(self, tag: bytes, generation: int) -> None:
        self.generations.raise_to(tag, generation)
        by_key = self.store.table.by_key
        rows = [row for name, row in by_key.items() if name[:8] == tag and self.generations.is_past(name)]
        self.store.spans.end(rows, "invalidated")

    def ask_own(self, size: int, uid: int, then: Callable[[int | TensordError], None]) -> None:
        self.places.append(lambda: self.lend_own(size, uid, then))
        if not self.holds_places:
            self.places.popleft()()

    def lend_own(self, size: int, uid: int, then: Callable[[int | TensordError], None]) -> None:
        self.own.owner = self.store.tenants.owner(uid)
        grant = None if self.no_room is not None else self.store.lend(size, NOBODY)
        then(grant.pieces[0] if grant is not None else self.no_room or StoreFull("no room"))

    def give_back_own(self, grant: LentGrant) -> None:
        del self.own.grants[grant.number]
        self.store.grants.revoke(grant)

    def commit_own(self, records: memoryview, now: float) -> None:
        self.store.commits.take(self.own, records, now)
        self.took(NOBODY)

    def took(self, client: int) -> None:
        """What follows from a batch of records."""
        commits = self.store.commits
        if client != NOBODY:
            self.room.writes.published(commits.fresh, self.now)
            self.room.writes.used([row for _, _, row in commits.existed], self.now)
        for _, _, _, name, token, _ in commits.refused:
            self.verdicts(self.claims.refused(token, 1000 + client, name, self.now))
        for name in commits.awaited:
            self.verdicts(self.claims.committed(name))
        self.refused = [reason for _, _, reason, *_ in commits.refused]
        for left in (commits.fresh, commits.existed, commits.refused, commits.awaited):
            left.clear()

    def verdicts(self, verdicts: list[Verdict]) -> None:
        self.outbox.send_verdicts(verdicts)

    # ---- one step at a time

    def do(self, event: RemoteEvent) -> None:
        self.outbox.now = self.now
        self.room.handle(event, self.now)
        self.flush()

    def flush(self) -> None:
        """Takes the effects."""
        self.store.claims.clear()
        self.store.claims.update(self.claims._by_key)
        for effect in self.outbox.take():
            match effect:
                case Send(client, message):
                    self.answers[client].append(message)
                case Seek():
                    self.seeks.append(effect)
                case SeekRun():
                    self.runs.append(effect)
                case ReadRemote():
                    self.reads.append(effect)
                case SaveRemote(_, name, offset, payload_bytes):
                    start = offset + SPAN_HEADER_BYTES
                    assert self.store.header(self.store.table.by_key[name]).key == name
                    self.writes.append((effect, bytes(self.store.ring[start : start + payload_bytes])))
                case RemoveRemote():
                    self.writes.append((effect, b""))
                case WithdrawClaim():
                    self.withdrawn.append(effect.key)
                    self.do(ClaimWithdrawn(True))
                case AskGenerations() | RaiseGeneration():
                    self.generation_requests.append(effect)
                case RemoteTurned(why, what, first):
                    self.turned[what].append("reached for the first time" if first else why)

    def tick(self) -> None:
        """Time has passed."""
        self.outbox.now = self.now
        self.verdicts(self.claims.expire(self.now, 100))
        self.room.tick(self.now)
        self.flush()

    def lend(self) -> None:
        """Lends the oldest place."""
        self.places.popleft()()
        self.flush()

    def seek(self, at: int = 0, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the at-th Seek, after so many seconds."""
        effect = self.seeks[at]
        del self.seeks[at]
        self.now += answer_s
        if error is not None:
            self.do(Sought(effect.number, error=error))
            return
        generation = self.remote_generation(effect)
        found = self.remote.get(effect.key) if generation in (None, generation_of(effect.key)) else None
        if found is None and effect.claims_s and effect.key in self.others:
            others_s = self.now - self.others[effect.key]
            self.do(Sought(effect.number, generation=generation, answer_s=answer_s, others_s=others_s))
            return
        self.do(Sought(effect.number, found, None, generation, answer_s, found is None and effect.claims_s > 0))

    def seek_run(self, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the oldest SeekRun, after so many seconds."""
        effect = self.runs.popleft()
        self.now += answer_s
        if error is not None:
            self.do(RunSought(effect.number, error=error))
            return
        generation = self.remote_generation(effect)
        shared = generation in (None, generation_of(effect.key))
        there = takewhile(lambda each: each in self.remote, effect.keys) if shared else ()
        found = tuple(self.remote[each] for each in there)
        self.do(RunSought(effect.number, found, generation=generation, answer_s=answer_s))

    def read(self, at: int = 0, error: TensordError | None = None) -> None:
        """The at-th read is carried out, or fails halfway."""
        effect = self.reads[at]
        del self.reads[at]
        start, size = effect.ring_offset, SPAN_HEADER_BYTES + effect.found.payload_bytes
        self.store.ring_memory[start : start + size] = bytes([effect.number % 251]) * size
        self.do(RemoteRead(effect.number, 7 if error is None else 0, error))

    def remote_generation(self, effect: Seek | SeekRun | SaveRemote) -> int | None:
        """The remote store's generation of a key's namespace, if it is asked for."""
        return self.remote_generations.get(effect.key[:8], 0) if effect.asks_generation else None

    def answer_generations(self, error: TensordError | None = None) -> None:
        """The remote store answers the oldest request about generations."""
        effect = self.generation_requests.popleft()
        if isinstance(effect, AskGenerations):
            told = {} if error else {tag: self.remote_generations.get(tag, 0) for tag in effect.tags}
            self.do(GenerationsTold(told, error))
            return
        if error is None:
            known = self.remote_generations.get(effect.tag, 0)
            if effect.new or known < effect.least:
                self.remote_generations[effect.tag] = max(known + 1, effect.least)
        self.do(GenerationRaised(effect.tag, None if error else self.remote_generations[effect.tag], error))

    def write_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th write to the remote store out, or has it fail."""
        effect, content = self.writes[at]
        del self.writes[at]
        generation = None if isinstance(effect, RemoveRemote) or error else self.remote_generation(effect)
        if isinstance(effect, RemoveRemote):
            for name in effect.keys if error is None else ():
                self.remote.pop(name, None)
        elif error is None:
            start = effect.offset + SPAN_HEADER_BYTES
            assert self.store.ring[start : start + effect.payload_bytes] == content, "a span changed under a write"
            if generation not in (None, generation_of(effect.key)):
                self.do(RemoteSaved(effect.number, written=False, generation=generation))
                return
            self.remote[effect.key] = RemoteFound(effect.payload_bytes, 16)
            row = self.store.table.by_key.get(effect.key)
            if row:
                header = self.store.header(row)
                parent, sizes = header.parent, (header.payload_bytes, header.tree_bytes, header.tokens)
                self.remote[effect.key] = RemoteFound(*sizes, header.cost_ms, parent=parent)
        self.do(RemoteSaved(effect.number, error, generation=generation))

    def settle(self) -> None:
        """Carries out whatever is under way, until nothing is."""
        self.go_on()
        steps = (
            (self.seeks, self.seek),
            (self.runs, self.seek_run),
            (self.writes, self.write_remote),
            (self.generation_requests, self.answer_generations),
            (self.places, self.lend),
            (self.reads, self.read),
        )
        while any(waiting for waiting, _ in steps):
            for waiting, carry_out in steps:
                while waiting:
                    carry_out()
            self.go_on()

    def go_on(self) -> None:
        """Ticks, for as long as there is something to do."""
        for _ in range(1000):
            timer = self.next_timer()
            if timer is None or timer > self.now:
                return
            self.tick()
        raise AssertionError("it goes on for ever")

    def next_timer(self) -> float | None:
        timers = (self.room.next_timer(), self.claims.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    def pass_time(self, seconds: float) -> None:
        """Time passes, and the store answers at once."""
        end = self.now + seconds
        while True:
            self.settle()
            timer = self.next_timer()
            if timer is None or timer > end:
                break
            self.now = max(self.now, timer)
            self.tick()
        self.now = end

    # ---- what clients do

    def send(self, client: int, message: Any) -> None:
        self.outbox.now = self.now
        uid, table = 1000 + client, self.store.table
        match message:
            case messages.RequestClaim(request, name, within_s):
                if name in table.by_key:
                    self.outbox.send(client, messages.Claimed(request, "hit"))
                else:
                    verdict = None
                    if not self.claims.claimed(name):
                        verdict = self.room.fetches.begin(client, uid, message, self.now)
                    if verdict is None:
                        verdict = self.claims.claim(name, client, request, self.now, uid, within_s)
                    self.verdicts([verdict])
            case messages.FetchRun():
                self.room.runs.begin(client, uid, message, self.now)
            case messages.Abandon(token):
                self.verdicts(self.claims.abandon(token, uid, self.now))
            case messages.Evict(_, names):
                self.store.spans.end([table.by_key[name] for name in names if name in table.by_key], "explicit")
                self.room.evicted(names, self.now)
            case messages.Invalidate(_, tag, generation):
                self.raise_generation(tag, generation + 1)
                self.verdicts(self.claims.void(tag))
                self.room.agreement.invalidated(tag, self.now)
            case _:
                raise AssertionError(message)
        self.flush()

    def put(
        self,
        number: int | bytes,
        payload_bytes: int = 64,
        client: int = 1,
        *,
        claim: int = 0,
        cost_ms: float = 0.0,
        parent: bytes | None = None,
        settles: bool = True,
    ) -> str:
        """A put of key `number`, or of a whole key; its outcome."""
        name = key(number) if isinstance(number, int) else number
        self.outbox.now = self.now
        self.flush()
        existed = name in self.store.table.by_key
        self.store.put(
            name,
            payload_bytes,
            client=client,
            uid=1000 + client,
            now=self.now,
            cost=cost_ms,
            parent=parent or NO_KEY,
            tree=16,
            claim=claim,
        )
        self.took(client)
        self.flush()
        if settles:
            self.settle()
        return "existed" if existed else "stored" if name in self.store.table.by_key else "refused"

    def use(self, number: int) -> None:
        """A reader's hit, as the access logs say."""
        self.outbox.now = self.now
        self.room.writes.used([self.store.table.by_key[key(number)]], self.now)
        self.flush()

    def leave(self, client: int) -> None:
        del self.answers[client], self.outbox.clients[client]
        self.outbox.now = self.now
        self.verdicts(self.claims.client_left(client, self.now))
        self.flush()

    def scan(self) -> None:
        """A scan, for which spans that are read count as pinned."""
        self.store.scan(self.room.writes.reading)

    def last(self, client: int = 1) -> Any:
        return self.answers[client][-1]

    def find(self, name: bytes) -> bytes | None:
        """What a reader sees."""
        return self.store.read(name)

    @property
    def counted(self) -> dict[str, int]:
        return dict(self.outbox.counters.remote)

    def state(self) -> dict[str, Any]:
        """What status says of the remote store."""
        state = self.room.state(self.now)
        assert state is not None
        return state

    @property
    def used_bytes(self) -> int:
        """Bytes of the ring that are not free after a scan."""
        self.scan()
        return self.store.ring_bytes - self.store.holes.total_bytes

    def check(self) -> None:
        self.room.check_invariants()
        self.claims.check_invariants()
        self.store.check_invariants()


class AllTags(set[bytes]):
    """Every namespace counts as invalidated once."""

    def __contains__(self, tag: object) -> bool:
        return True


def ask(stand: RemoteStand, client: int = 1, number: int = 1, within_s: float = 0.5) -> messages.Claimed:
    """A client asks for the claim on a missing key. What it is answered at once."""
    request = 1000 + len(stand.answers[client])
    stand.send(client, messages.RequestClaim(request, key(number), within_s))
    answer: messages.Claimed = stand.last(client)
    assert answer.id == request
    return answer


def verdicts(stand: RemoteStand, client: int = 1) -> list[str]:
    return [answer.answer for answer in stand.answers[client] if isinstance(answer, messages.Claimed)]


def fail(stand: RemoteStand, number: int, error: Any = None) -> None:
    """A client's read fails, and it computes."""
    assert ask(stand, number=number).answer == "wait"
    stand.seek(error=error or TierUnavailable("connection refused"))
    assert verdicts(stand)[-1] == "compute"


def publish(stand: RemoteStand, count: int, payload_bytes: int = 64) -> None:
    """Publishes entries that are worth their write, with the keys of 0 to `count` - 1. Nothing is written yet."""
    for number in range(count):
        stand.put(number, payload_bytes, cost_ms=9.0, settles=False)


Make = Callable[..., RemoteStand]
