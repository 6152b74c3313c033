"""A store actor with a real core, real shared memory and a real copier, in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from mmap import mmap
from typing import Any, TypeVar

import numpy as np

from tensord.client.writing.inbox import Inbox as ClientInbox
from tensord.daemon.actors.mailbox import Mailbox
from tensord.daemon.actors.messages import (
    Deliver,
    Grown,
    HangUp,
    Joined,
    MemoryRequest,
    Queried,
    Reconfigured,
    Requested,
)
from tensord.daemon.actors.store import StoreActor
from tensord.daemon.config.config import Config
from tensord.daemon.config.limits import store_limits
from tensord.daemon.core.parts import StoreMemory
from tensord.daemon.core.store import Store
from tensord.daemon.memory.segments import Segments
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.descriptors import Peer
from tensord.shm.lanes.records import NO_KEY, SUBMITTED_AT, Submissions
from tensord.shm.payloads.packing import pack
from tensord.shm.ring.layout import LANE_BYTES, QUEUE_AT, SPAN_HEADER_BYTES, span_bytes

from ...memory_bench import key

PATIENCE_S = 30.0
Answer = TypeVar("Answer")


class Client:
    """What a session and its peer are to the store actor: messages in, what is delivered out, records in the lane."""

    def __init__(self, number: int, actor: StoreActor, memory: Segments) -> None:
        self.number = number
        self.inbox: Mailbox[Deliver | HangUp] = Mailbox(1 << 20)
        self._actor = actor
        self._memory = memory
        self._sender = (os.getuid(), number)
        self._requests = 0
        self.held: list[Any] = []
        """Answers that came before the one that was asked for."""
        peer = Peer(os.getpid(), os.getuid(), os.getgid())
        self.tell(Joined(number, peer, f"client-{number}", os.getpid(), True, self.inbox))

    def tell(self, message: Any) -> None:
        self._actor.inbox.tell_now(message, self._sender)

    def ask(self, message: Any) -> None:
        self.tell(Requested(self.number, message))

    def request(self) -> int:
        self._requests += 1
        return self._requests

    async def heard(self, kind: type[Answer]) -> Answer:
        """The next answer, which is of that kind. The lane's descriptor, where one comes along, is closed."""
        async with asyncio.timeout(PATIENCE_S):
            (word,) = await self.inbox.take(1)
        assert isinstance(word, Deliver), word
        if isinstance(word.message, messages.Attached):
            self._map(word.fds[2], word.message.place)
        for fd in word.close:
            os.close(fd)
        assert isinstance(word.message, kind), word.message
        return word.message

    async def attach(self, inbox: ClientInbox | None = None) -> None:
        """Gets a lane, and writes into the ring, or into its inbox."""
        self.tell(MemoryRequest(self.number, messages.Attach(self.request()), ()))
        await self.heard(messages.Attached)
        self.written = inbox
        if inbox is None:
            self.tell(MemoryRequest(self.number, messages.OpenRing(self.request()), ()))
            await self.heard(messages.WritableRing)
        else:
            opened = messages.OpenInbox(self.request(), inbox.size_bytes)
            self.tell(MemoryRequest(self.number, opened, (os.dup(inbox.fd),)))
            await self.heard(messages.Done)

    def _map(self, lane_fd: int, place: int) -> None:
        lane = memoryview(mmap(lane_fd, LANE_BYTES))
        words, queue = lane.cast("Q"), lane[QUEUE_AT:]
        memory = self._memory
        self.queue = Submissions(words, SUBMITTED_AT, queue, memory.settled, place, memory.asleep)

    async def places(self, sizes: Iterable[int]) -> list[Any]:
        """Grants of these sizes of payloads, as many as were lent."""
        self.ask(messages.AskForGrants(self.request(), [span_bytes(size) for size in sizes]))
        answer = await self.heard(messages.GrantsLent)
        assert answer.error is None, answer.error
        return answer.grants

    def put(self, number: int, place: Any, payload: Any, tokens: int = 0) -> int:
        """Writes a payload into a place, and its record. Returns the record's number."""
        grant, offset = place[:2]
        start, size = offset + SPAN_HEADER_BYTES, payload.payload_bytes
        into = self._memory.ring if self.written is None else np.frombuffer(mmap(self.written.fd, 0), np.uint8)
        payload.write(into.data, start)
        fields = key(number), offset, size, 1, 0, NO_KEY, 0.0, 0.0, grant, len(payload.header), tokens, 0, 0, 0
        record = self.queue.add(*fields)
        assert record
        if self.queue.rings:
            self.ask(messages.Doorbell())
        return record

    async def settled(self, record: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.queue.settled < record:
                await asyncio.sleep(0)


class ActorStand:
    """The actor, which runs until the stand is closed, and its parts."""

    def __init__(self, config: Config, memory: Segments, store: Store, actor: StoreActor) -> None:
        self.config, self.memory, self.store, self.actor = config, memory, store, actor
        self._clients = 0
        self.payload = pack(np.zeros(4, np.uint8))
        """What `fill` puts."""

    def client(self) -> Client:
        self._clients += 1
        return Client(self._clients, self.actor, self.memory)

    def ask(self, question: messages.StatusRequest) -> asyncio.Future[dict[str, Any]]:
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.actor.inbox.tell_now(Queried(question, told))
        return told

    async def status(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.ask(messages.StatusQuery(0))

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Asks again and again for the status until `condition(status)` is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(status := await self.status()):
                await asyncio.sleep(0)
        return status

    async def fill(self, entries: int, client: Client | None = None, first: int = 0) -> Client:
        """Puts so many small entries of one token each, keys `first` to `first` + `entries` - 1."""
        if client is None:
            client = self.client()
            await client.attach()
        numbers, record = iter(range(first, first + entries)), 0
        left = entries
        while left:
            for place in await client.places([self.payload.payload_bytes] * min(left, 64)):
                record = client.put(next(numbers), place, self.payload, 1)
                left -= 1
            await client.settled(record)
        return client

    def reconfigure(self, **changed: Any) -> None:
        """As SIGHUP does."""
        self.config = replace(self.config, **changed)
        superblock = self.memory.superblock
        limits = store_limits(self.config, superblock.limit_bytes, superblock.max_entries)
        self.actor.inbox.tell_now(Reconfigured(limits, self.config))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@asynccontextmanager
async def serving(**given: Any) -> AsyncIterator[ActorStand]:
    """A stand with a ring of 4 MiB whose actor runs; its core's invariants are checked at the end."""
    instance = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    given = {"instance": instance, "ring_bytes": 4 << 20, "max_entries": 8192, "policy": "lru", **given}
    config = Config.load([word for name, value in given.items() for word in (_flag(name), str(value))], {})
    memory = Segments.open(config.instance, config.ring_bytes, config.max_entries)
    try:
        limits = store_limits(config, config.ring_bytes, config.max_entries)
        ring = StoreMemory(memory.index, memory.index_memory, memory.superblock.geometry, memory.ring_memory, 0)
        store = Store(ring, config.policy, limits, memory.superblock.epoch)
        actor = StoreActor(store, memory, config, clock=time.monotonic, tell_watchers=lambda _: None)
        stand = ActorStand(config, memory, store, actor)
        actor.inbox.tell_now(Grown(memory.grow(0, prefault=False)))
        running = asyncio.create_task(actor.run())
        try:
            yield stand
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        store.check_invariants()
    finally:
        memory.close(drop=True)
