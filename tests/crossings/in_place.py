"""States of a put in place: this process writes the payload into the ring itself."""

from __future__ import annotations

import os
import threading
from typing import Any, Final
from unittest import mock

from tensord.client.core import in_place, puts
from tensord.client.core.ring_writer import RingWriter
from tensord.shm.payload import Payload

from ..daemon_process import PATIENCE_S, until
from .payloads import KIB
from .under_way import Putting

_PIECE_BYTES: Final = 32 * KIB


class InPlace(Putting):
    """A small put in place. Its copy stops after the first part until `go`."""

    returns = False

    def __init__(self, party: Any) -> None:
        super().__init__(party)
        self.pid = os.getpid()
        self.reached, self.go = threading.Event(), threading.Event()
        self.thread = None

    def prepare(self) -> None:
        super().prepare()
        write = RingWriter.write

        def write_slowly(writer: RingWriter, payload: Payload, offset: int) -> bytes:
            is_mine = threading.current_thread() is self.thread
            slow: Any = _Slow(payload, self.reached, self.go) if is_mine else payload
            return write(writer, slow, offset)

        for patch in (
            mock.patch.object(puts, "IN_PLACE_BYTES", self.size_bytes),
            mock.patch.object(Payload, "piece_bytes", _PIECE_BYTES),
            mock.patch.object(RingWriter, "write", write_slowly),
        ):
            # For the rest of this process.
            patch.start()

    def write_half(self) -> None:
        """Begins the put, and returns during the copy."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        with (
            # On a busy machine the put would go through the inbox.
            mock.patch.object(in_place, "SPAN_S_MAX", PATIENCE_S),
            mock.patch.object(in_place, "_OPEN_S", PATIENCE_S),
        ):
            self.thread.start()
            until(lambda: self.reached.is_set() or self.raised, "the copy to begin")
        assert self.raised is None and self.put is None, (self.raised, self.put)

    def settle(self) -> None:
        self.go.set()
        super().settle()

    def drop(self) -> None:
        self.go.set()
        super().drop()


class Writing(InPlace):
    name = "put in place, its copy under way"
    under_way = False

    def enter(self) -> None:
        self.write_half()


class WritingLate(Writing):
    """The copy continues after others have overwritten the ring."""

    name = "put in place, its copy goes on late"

    def settle(self) -> None:
        pass

    def check(self) -> None:
        if os.getpid() == self.pid:
            self.go.set()
            Putting.settle(self)
        super().check()


class Filled(InPlace):
    name = "put in place, filled"

    def prepare(self) -> None:
        super().prepare()
        self.write_half()

    def enter(self) -> None:
        self.go.set()
        until(lambda: self.put or self.raised, "the copy to end")


class Asked(InPlace):
    """The daemon has not answered the put's TakeSpan."""

    name = "put in place, waiting for its span"

    def enter(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        asked = spans_of(self.party)._asked
        until(lambda: asked or self.reached.is_set() or self.put or self.raised, "the span to be asked for")


class Ahead(InPlace):
    """Spans are given for puts that have not begun."""

    name = "spans taken in advance"
    under_way = False

    def enter(self) -> None:
        for number in range(2):
            self.party.put(f"ahead-{number}", self.size_bytes, wait=True)
        until(lambda: not spans_of(self.party)._asked, "the daemon to answer")
        self.go.set()
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


def spans_of(party: Any) -> Any:
    """The spans of the party's client."""
    return party.client.link.puts._in_place.spans


class _Slow:
    """A payload whose copy waits after the first part."""

    def __init__(self, payload: Payload, reached: threading.Event, go: threading.Event) -> None:
        self._payload = payload
        self._reached = reached
        self._go = go
        self.payload_bytes, self.piece_bytes = payload.payload_bytes, payload.piece_bytes

    def write_range(self, to: Any, start: int, stop: int) -> None:
        self._payload.write_range(to, start, stop)
        if not start:
            self._reached.set()
            self._go.wait()


IN_PLACE: Final = [Writing, WritingLate, Filled, Asked, Ahead]
