"""The three programs of one_card.py, each in a process of its own: a chat engine, a coding agent, image generation.

Owns: the answers to requests, and the memory that they take, with tensord (`Governed`) or without it (`Alone`). Does
not own: the load (card_day.py), the clock of the day (one_card.py).

Invariant: a `DeviceFull` of an allocation is an out-of-memory error. It fails the request, and is counted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

import card_day
import numpy as np
from card_day import CARD, ENTRY_BYTES, ENTRY_TOKENS, ChatRequest, CodingTurn, ImageJob
from demonstration import PATIENCE_S

import tensord
from tensord.errors import DeviceFull
from tensord.testing.fake_vram import FakeCard, FakeTensor, FakeVram

WAIT_S: Final = 30.0
Kind = Literal["encoder", "kv"]
Content = FakeTensor | np.ndarray[Any, Any]


@dataclass
class Tally:
    """The counts of one program.

    Every request is served, ends with an out-of-memory error, or is refused: no reservation within WAIT_S. `lookups`
    and `hits`: entries that requests needed, and those found on the card or in the host's memory. `saved_s`: the
    declared cost of the hits. `waits`, `waited_s`: requests that waited for memory, and how long. `offloaded`,
    `dropped`: entries that left the card, with a copy in the host's memory and without. `fetched`: hits in the host's
    memory. `given_up`: adapters that the chat engine dropped under pressure. `wrong`: hits with other bytes.
    """

    requests: int = 0
    served: int = 0
    out_of_memory: int = 0
    refused: int = 0
    waits: int = 0
    waited_s: float = 0.0
    lookups: int = 0
    hits: int = 0
    saved_s: float = 0.0
    offloaded: int = 0
    dropped: int = 0
    fetched: int = 0
    given_up: int = 0
    wrong: int = 0

    def add(self, other: Tally) -> None:
        """Adds the counts of `other`."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class NoRoom(Exception):
    """No memory was reserved within WAIT_S."""


# ---- a program's memory on the card


class Memory(ABC):
    """A program's entries on the card."""

    def __init__(self, card: FakeCard) -> None:
        self.card = card
        self.device = FakeVram(card)
        self.tally = Tally()

    @abstractmethod
    def find(self, name: str, held: ExitStack) -> Content | None:
        """The content of an entry, which stays until `held` is closed; None if it has to be computed."""

    @abstractmethod
    def keep(self, name: str, tensor: FakeTensor, kind: Kind, cost_ms: float) -> None:
        """Keeps a tensor for later requests."""

    @abstractmethod
    def room(self, size_bytes: int) -> AbstractContextManager[None]:
        """Announces an allocation of `size_bytes`, to be made in the `with` block.

        Raises:
            NoRoom: others hold the memory.
        """

    @abstractmethod
    def ran_out(self) -> None:
        """Makes room for the next request, after an out-of-memory error."""

    def take_counts(self) -> Tally:
        """The counts since the last call."""
        taken, self.tally = self.tally, Tally()
        return taken

    def look_up(self, name: str, cost_ms: float, held: ExitStack) -> bool:
        """Whether an entry need not be computed; its bytes are compared with those that were computed."""
        self.tally.lookups += 1
        found = self.find(name, held)
        if found is None:
            return False
        self.tally.hits += 1
        self.tally.saved_s += cost_ms / 1000
        array = found.numpy() if isinstance(found, FakeTensor) else found
        self.tally.wrong += not np.array_equal(array, card_day.content(name))
        return True

    def compute(self, name: str, kind: Kind, cost_ms: float) -> None:
        """Allocates an entry, and keeps it.

        Raises:
            DeviceFull: the card is out of memory.
        """
        self.keep(name, self.device.upload(card_day.content(name)), kind, cost_ms)


class Alone(Memory):
    """A cache of a fixed number of entries, the least recently used leaves first. After an error half of it goes."""

    def __init__(self, card: FakeCard, entries_max: int) -> None:
        super().__init__(card)
        self._entries: OrderedDict[str, FakeTensor] = OrderedDict()
        self._entries_max = entries_max

    def find(self, name: str, held: ExitStack) -> Content | None:
        tensor = self._entries.get(name)
        if tensor is not None:
            self._entries.move_to_end(name)
        return tensor

    def keep(self, name: str, tensor: FakeTensor, kind: Kind, cost_ms: float) -> None:
        self._entries[name] = tensor
        self._drop_to(self._entries_max)

    def ran_out(self) -> None:
        self._drop_to(len(self._entries) // 2)
        self.device.give_back()

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        yield

    def _drop_to(self, entries_max: int) -> None:
        while len(self._entries) > entries_max:
            self._entries.popitem(last=False)
            self.tally.dropped += 1


class Governed(Memory):
    """Entries of a `DeviceCache`. The daemon decides which of them stay on the card, over all processes."""

    def __init__(self, card: FakeCard, client: tensord.Client, agent: str) -> None:
        super().__init__(card)
        self._agent = agent
        self._cache = tensord.DeviceCache(client, self.device)
        self._names = tensord.Namespace(model=agent, revision="1", dtype="uint8", processor="none")
        self._counted = (0, 0, 0)

    def find(self, name: str, held: ExitStack) -> Content | None:
        lease = self._cache.get(self._key(name), promote=True)
        if lease is None:
            return None
        content: Content = held.enter_context(lease).tree["hidden"]
        return content

    def keep(self, name: str, tensor: FakeTensor, kind: Kind, cost_ms: float) -> None:
        # Refused in an emergency: the entry is not kept, and the request is served all the same.
        self._cache.put(
            self._key(name), {"hidden": tensor}, tokens=ENTRY_TOKENS, agent=self._agent, cost_ms=cost_ms, kind=kind
        )

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        try:
            reservation = self._cache.reserve(size_bytes, wait_s=0)
        except DeviceFull:
            reservation = self._waited(size_bytes)
        with reservation:
            yield

    def ran_out(self) -> None:
        pass  # the daemon makes room

    def take_counts(self) -> Tally:
        tally = self._cache.tally
        now = tally.offloaded, tally.dropped, tally.host_hits
        self.tally.offloaded, self.tally.dropped, self.tally.fetched = (
            later - before for later, before in zip(now, self._counted, strict=True)
        )
        self._counted = now
        return super().take_counts()

    def _waited(self, size_bytes: int) -> tensord.DeviceReservation:
        began = time.monotonic()
        self.tally.waits += 1
        try:
            return self._cache.reserve(size_bytes, wait_s=WAIT_S)
        except DeviceFull as error:
            raise NoRoom from error
        finally:
            self.tally.waited_s += time.monotonic() - began

    def _key(self, name: str) -> bytes:
        return self._names.key("encoder", "image", name.encode())


# ---- the programs


class Program(ABC):
    """Answers requests, and counts how they end."""

    def __init__(self, memory: Memory, hour_s: float) -> None:
        self.memory = memory
        self.hour_s = hour_s

    def serve(self, request: Any) -> None:
        """Answers one request."""
        tally = self.memory.tally
        tally.requests += 1
        try:
            with ExitStack() as held:
                self.answer(request, held)
        except DeviceFull:
            tally.out_of_memory += 1
            self.memory.ran_out()
        except NoRoom:
            tally.refused += 1
        else:
            tally.served += 1

    @abstractmethod
    def answer(self, request: Any, held: ExitStack) -> None:
        """Answers one request. Raises NoRoom, and DeviceFull where an allocation fails."""


class ChatEngine(Program):
    """Holds its weights and KV all day. Keeps encoder outputs of pictures, and adapters in a cache of its own."""

    def __init__(self, memory: Memory, hour_s: float, client: tensord.Client | None) -> None:
        super().__init__(memory, hour_s)
        self._adapters: dict[int, FakeTensor] = {}
        memory.card.occupy(card_day.BASELINE_BYTES)
        if client is not None:
            client.declare_baseline(CARD, card_day.BASELINE_BYTES)
            self._subscription = client.on_mode(self._changed, gauge=CARD)

    def answer(self, request: ChatRequest, held: ExitStack) -> None:
        name, memory = f"picture {request.picture}", self.memory
        adapter = self._adapters.get(request.adapter)
        found = memory.look_up(name, card_day.PICTURE_MS, held)
        wanted_bytes = 0 if found else card_day.ENCODER_BYTES + ENTRY_BYTES
        wanted_bytes += card_day.ADAPTER_BYTES if adapter is None else 0
        if not wanted_bytes:
            return
        with memory.room(wanted_bytes):
            if adapter is None:
                self._adapters[request.adapter] = memory.device.empty(card_day.ADAPTER_BYTES, np.uint8)
            if not found:
                activations = memory.device.empty(card_day.ENCODER_BYTES, np.uint8)
                memory.compute(name, "encoder", card_day.PICTURE_MS)
                del activations

    def _changed(self, change: tensord.ModeChange) -> None:
        if change.refuses or change.mode == "critical":
            self.memory.tally.given_up += len(self._adapters)
            self._adapters.clear()
            self.memory.device.give_back()


class CodingAgent(Program):
    """Keeps the KV of its sessions. A block can be used only with all blocks before it."""

    def answer(self, request: CodingTurn, held: ExitStack) -> None:
        names = [f"session {request.session}, block {number}" for number in range(request.blocks + 1)]
        first_missing = 0
        while first_missing < request.blocks and self.memory.look_up(names[first_missing], card_day.BLOCK_MS, held):
            first_missing += 1
        # The blocks after the first missing one are computed again with it.
        self.memory.tally.lookups += max(0, request.blocks - first_missing - 1)
        missing = names[first_missing:]
        with self.memory.room(len(missing) * ENTRY_BYTES):
            for name in missing:
                self.memory.compute(name, "kv", card_day.BLOCK_MS)


class ImageGeneration(Program):
    """Takes much memory for each job, and gives all of it back."""

    def answer(self, request: ImageJob, held: ExitStack) -> None:
        device, filling = self.memory.device, request.number + 1
        try:
            with self.memory.room(card_day.JOB_BYTES):
                working = device.empty(card_day.JOB_BYTES, np.uint8)
            working.fill_(filling)
            time.sleep(card_day.JOB_HOURS * self.hour_s)  # the job's work
            self.memory.tally.wrong += not (working.numpy() == filling).all()
            del working
        finally:
            device.give_back()


def be_program(name: str, folder: Path, socket: Path | None, hour_s: float, orders: Connection) -> None:
    """Runs one program: for each order (hour, its begin), serves the requests of the hour, and answers with a Tally.

    Args:
        socket: the daemon's socket; None: without tensord.
        hour_s: the seconds that an hour of the day takes here.
    """
    with ExitStack() as stack:
        card = stack.enter_context(FakeCard(folder, CARD))
        client = None
        memory: Memory
        if socket is None:
            memory = Alone(card, {"chat": card_day.CHAT_ENTRIES, "coder": card_day.CODER_ENTRIES}.get(name, 0))
        else:
            client = stack.enter_context(tensord.Client(socket, name=name, timeout_s=PATIENCE_S, required=True))
            memory = Governed(card, client, name)
        program: Program
        requests: Sequence[ChatRequest | CodingTurn | ImageJob]
        match name:
            case "chat":
                program, requests = ChatEngine(memory, hour_s, client), card_day.chat_day()
            case "coder":
                program, requests = CodingAgent(memory, hour_s), card_day.coder_day()
            case _:
                program, requests = ImageGeneration(memory, hour_s), card_day.image_day()
        orders.send("ready")
        while (order := orders.recv()) is not None:
            hour, began = order
            for request in requests:
                if int(request.at) == hour:
                    # The load has times of its own. A program that is late goes on at once.
                    time.sleep(max(0.0, began + (request.at - hour) * hour_s - time.monotonic()))
                    program.serve(request)
            orders.send(memory.take_counts())
