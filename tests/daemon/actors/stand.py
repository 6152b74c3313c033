"""A store actor with a real core, real shared memory and a real copier, in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tensord.client.core.inbox import Inbox as ClientInbox
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
from tensord.daemon.core.store import Store
from tensord.daemon.policy.registry import by_name
from tensord.daemon.segments import Segments
from tensord.ipc import messages
from tensord.ipc.peer import Peer
from tensord.shm.allocator import SpanAllocator
from tensord.shm.tree import encode

from ...memory_bench import key

PATIENCE_S = 30.0
INBOX_BYTES = 1 << 20
Answer = TypeVar("Answer")


class Client:
    """What a session and its peer are to the store actor: messages in, what is delivered out."""

    def __init__(self, number: int, actor: StoreActor) -> None:
        self.number = number
        self.inbox: Mailbox[Deliver | HangUp] = Mailbox(1 << 20)
        self._actor = actor
        self._sender = (os.getuid(), number)
        self._requests = 0
        peer = Peer(os.getpid(), os.getuid(), os.getgid())
        self.tell(Joined(number, peer, f"client-{number}", os.getpid(), True, self.inbox))

    def tell(self, message: Any) -> None:
        self._actor.inbox.tell_now(message, self._sender)

    def request(self) -> int:
        self._requests += 1
        return self._requests

    async def heard(self, kind: type[Answer]) -> Answer:
        """The next answer, which is of that kind. The lane's descriptor, where one comes along, is closed."""
        async with asyncio.timeout(PATIENCE_S):
            (word,) = await self.inbox.take(1)
        assert isinstance(word, Deliver), word
        for fd in word.close:
            os.close(fd)
        assert isinstance(word.message, kind), word.message
        return word.message

    async def open_inbox(self) -> ClientInbox:
        inbox = ClientInbox(INBOX_BYTES)
        self.tell(MemoryRequest(self.number, messages.OpenInbox(self.request(), INBOX_BYTES), (os.dup(inbox.fd),)))
        await self.heard(messages.Done)
        return inbox

    def commit(self, number: int, payload_bytes: int, tree_bytes: int, tokens: int) -> None:
        """A whole put of the payload at the inbox's beginning."""
        request = self.request()
        commit = messages.Commit(request, key(number), payload_bytes, tree_bytes, tokens=tokens, acks=False)
        self.tell(Requested(self.number, commit))
        self.tell(Requested(self.number, messages.Part(request, 0, payload_bytes, True)))


class ActorStand:
    """The actor, which runs until the stand is closed, and its parts."""

    def __init__(self, config: Config, memory: Segments, store: Store, actor: StoreActor) -> None:
        self.config, self.memory, self.store, self.actor = config, memory, store, actor
        self._clients = 0
        self.payload_bytes = self.tree_bytes = 0
        """Of the payload that `fill` put at the beginning of its client's inbox."""

    def client(self) -> Client:
        self._clients += 1
        return Client(self._clients, self.actor)

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

    async def fill(self, entries: int, client: Client | None = None) -> Client:
        """Puts so many small entries of one token each, keys 0 to `entries` - 1."""
        client = client or self.client()
        inbox = await client.open_inbox()
        payload = encode(np.zeros(4, np.uint8))
        region = inbox.take(INBOX_BYTES, 0)
        assert region is not None and region.memory is not None
        payload.write_into(region.memory)
        self.payload_bytes, self.tree_bytes = payload.payload_bytes, len(payload.header)
        for number in range(entries):
            client.commit(number, self.payload_bytes, self.tree_bytes, 1)
            committed = await client.heard(messages.Committed)
            assert committed.outcome == "stored", committed
        return client

    def reconfigure(self, **changed: Any) -> None:
        """As SIGHUP does."""
        self.config = replace(self.config, **changed)
        limits = store_limits(self.config, self.actor.ring_bytes, self.actor.max_entries)
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
        policy = by_name(config.policy)
        store = Store(memory.index, SpanAllocator(0), policy, limits, memory.superblock.epoch, read=memory.read)
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
