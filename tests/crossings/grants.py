"""States of the places that the daemon lends: this process writes payloads there, or waits for one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest import mock

from tensord.client.writing.puts import Puts
from tensord.errors import LimitReached
from tensord.ipc.messages import control as messages
from tensord.shm.payloads.packing import Packed

from ..daemon_process import until
from .payloads import KIB, words
from .under_way import LONG_BYTES, ROOM_BYTES, Putting


class Granted(Putting):
    """A put whose copy stops half-way until `go`."""

    returns = False

    def __init__(self, party: Any) -> None:
        super().__init__(party)
        self.pid = os.getpid()
        self.reached, self.go = threading.Event(), threading.Event()
        self.thread = None

    def prepare(self) -> None:
        super().prepare()
        write = Packed.write

        def write_slowly(packed: Packed, memory: memoryview, start: int) -> None:
            if threading.current_thread() is not self.thread:
                write(packed, memory, start)
                return
            whole = bytearray(packed.payload_bytes)
            write(packed, memoryview(whole), 0)
            middle = start + len(whole) // 2
            memory[start:middle] = whole[: middle - start]
            self.reached.set()
            self.go.wait()
            memory[middle : start + len(whole)] = whole[middle - start :]

        # For the rest of this process.
        mock.patch.object(Packed, "write", write_slowly).start()

    def write_half(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        until(lambda: self.reached.is_set() or self.raised, "the copy to begin")
        assert self.raised is None and self.put is None, (self.raised, self.put)

    def settle(self) -> None:
        self.go.set()
        super().settle()

    def drop(self) -> None:
        self.go.set()
        super().drop()


class Writing(Granted):
    name = "copy into a grant under way"
    under_way = False

    def enter(self) -> None:
        self.write_half()


class WritingLate(Writing):
    """The copy continues after others have overwritten the ring."""

    name = "copy into a grant goes on late"

    def settle(self) -> None:
        pass

    def check(self) -> None:
        if os.getpid() == self.pid:
            self.go.set()
            Putting.settle(self)
        super().check()


class Recorded(Granted):
    """The record is in the queue, and the daemon has not taken it."""

    name = "record written and not taken"

    def prepare(self) -> None:
        super().prepare()
        self.write_half()

    def enter(self) -> None:
        self.go.set()
        until(lambda: self.put or self.raised, "the copy to end")


class Idle(Putting):
    """Grants are held, and nothing is put. The next put goes into one of them."""

    name = "grants held and idle"
    under_way = False

    def enter(self) -> None:
        for number in range(2):
            self.party.put(f"ahead-{number}", self.size_bytes, wait=True)
        until(lambda: not self.party.client.link.puts.waiting, "the daemon to answer")
        self.thread = threading.Thread(target=self._run, daemon=True)

    def settle(self) -> None:
        # After the disturbance.
        assert self.thread is not None
        if self.thread.ident is None:
            self.thread.start()
        super().settle()

    def _run(self) -> None:
        self.party.attached()
        super()._run()


class AskedFor(Putting):
    """The daemon has not answered a request for a place."""

    name = "grant asked for"
    size_bytes = LONG_BYTES
    returns = False


class Full(Putting):
    """Every grant is used up, and a put waits for another."""

    name = "every grant used up"
    returns = False

    def begin(self) -> Any:
        # The party may lose its client meanwhile.
        client, number = self.party.client, 0
        while (writer := client.link.puts.writer) is not None and writer.arena.left_bytes > 64 * KIB and number < 64:
            key = self.party.key(f"filler-{number}")
            client.put(key, words(key, 48 * KIB), timeout_s=0.0)
            number += 1
        key = self.party.key("mine")
        return client.put(key, words(key, self.size_bytes), timeout_s=self.party.patience_s)


class ThroughInbox(Putting):
    """The client may not write into the ring: the daemon copies its payload out of an inbox, in a thread of its own."""

    name = "payload in an inbox, not copied yet"
    size_bytes = ROOM_BYTES

    def prepare(self) -> None:
        memory = Puts._memory

        def refused(puts: Puts, *about: Any) -> Any:
            link = puts._link
            if link is not self.party.client.link:
                return memory(puts, *about)
            with mock.patch.object(link, "ask", partial(_refusing, link.ask)):
                return memory(puts, *about)

        mock.patch.object(Puts, "_memory", refused).start()
        super().prepare()
        self.party.has_room(self.size_bytes)


def _refusing(ask: Callable[..., Any], make: Any, *about: Any, **more: Any) -> Any:
    """`Link.ask` beside a daemon that lets no client write into the ring."""
    if make is messages.OpenRing:
        raise LimitReached("write_in_place is off")
    return ask(make, *about, **more)


GRANTS: Final = [Writing, WritingLate, Recorded, Idle, AskedFor, Full, ThroughInbox]
