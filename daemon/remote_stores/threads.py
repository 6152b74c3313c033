"""Carries out the core's requests of the remote store, in threads.

Owns: the threads, and the outcome of each request. Does not own: what is read or written (`daemon/remote`), how
(`daemon.remote_stores`), nor spans: the core lends the places to read into, and keeps what is written.

Invariants: every request has an outcome. An object is read straight into its place, and nothing of it is shown
before its key, its checksum and its tree were checked there. No call of the store is made on the event loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import InitVar, dataclass
from itertools import takewhile
from math import inf
from typing import Any, Final

import numpy as np

from ...errors import Corrupt, TensordError
from ...shm.index.keys import generation_of
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import KEY_BYTES, SPAN_HEADER_BYTES, SpanHeader
from ..forms.effects import (
    AskGenerations,
    RaiseGeneration,
    ReadRemote,
    RemoteRequest,
    RemoteTurned,
    RemoveRemote,
    SaveRemote,
    Seek,
    WithdrawClaim,
)
from ..forms.events import RemoteDone, RemoteEntry, RemoteSaved, Sought
from ..process.give_way import GivesWay
from ..process.logs import logger
from .store import RemoteStore

_log = logger("store")
READERS: Final = 8
DAMAGED_MAX: Final = 1024
GRACE_S: Final = 1.0
"""How much longer than its time a read may take before it counts as hanging."""
THREAD_NAME: Final = "tensord-remote"
_NOBODYS: Final = bytes(KEY_BYTES)
"""A key that nobody has. To ask for it shows whether the store answers."""


@dataclass(eq=False, repr=False)
class RemoteThreads:
    """The threads that use `store`.

    Args:
        ring: (ring_bytes,) uint8.
        check: checks the tree of a payload in the ring (`Copier.check`).
        report: takes each outcome, in the threads.
        clock: gives the seconds of `shm.clock`.
    """

    _store: RemoteStore
    ring: InitVar[np.ndarray[Any, np.dtype[np.uint8]]]
    _check: Callable[[int, int, int], object]
    _report: Callable[[RemoteDone], object]
    _clock: Callable[[], float]

    def __post_init__(self, ring: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._ring = ring.data
        # Names this daemon among all that claim keys in the store.
        self._owner = secrets.token_bytes(16)
        # Keys whose objects could not be read although their headers were in order: they are written anew.
        self._damaged: dict[bytes, None] = {}
        self._reads: set[Future[None]] = set()
        self._closing = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, f"{THREAD_NAME}-read")
        self._gives_way = GivesWay(self._closing)
        self._writer = ThreadPoolExecutor(1, f"{THREAD_NAME}-write", GivesWay.lower_priority)

    def status(self) -> dict[str, Any]:
        """The store's address, and what was read from it that is wrong."""
        store = self._store
        return {"address": store.address, "corrupt": store.corrupt, "last_corrupt": store.last_corrupt}

    def submit(self, request: RemoteRequest) -> None:
        """Queues a request. After `close` it is dropped: entries are still published then, which the store is not told
        of."""
        if self._closing.is_set():
            return
        if isinstance(request, SaveRemote | RemoveRemote):
            self._writer.submit(self._write_aside, request)
        else:
            read = self._readers.submit(self.carry_out, request, time.monotonic())
            if isinstance(request, ReadRemote):
                self._reads = {each for each in self._reads if not each.done()} | {read}

    def close(self) -> bool:
        """Drops what is queued, closes the store, and waits for the reads under way, which write into the ring. Returns
        False if one has not ended by then: the ring must not be given to another daemon."""
        self._closing.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        return not wait(self._reads, self._store.timeout_s + GRACE_S).not_done

    def _write_aside(self, request: SaveRemote | RemoveRemote) -> None:
        with self._gives_way.working(hurried=isinstance(request, RemoveRemote) or request.hurried):
            self.carry_out(request)

    def carry_out(self, request: RemoteRequest, asked_at: float = inf) -> None:
        """Has the store do it, and reports the outcome. A request that has waited for its thread for as long as the
        store may take fails, as those before it have."""
        try:
            if time.monotonic() - asked_at > self._store.timeout_s:
                raise self._store.timed_out()
            done = RemoteDone(request, self._answer(request))
        except TensordError as error:
            done = RemoteDone(request, error=error)
        except Exception as error:
            # The core must get an outcome, or the request's span is never freed.
            done = RemoteDone(request, error=TensordError(f"{self._store.address}: the request failed: {error!r}"))
        self._report(done)

    def _answer(self, request: RemoteRequest) -> Any:
        store = self._store
        match request:
            case Seek():
                return self._seek(request)
            case ReadRemote():
                return self._read(request)
            case SaveRemote():
                return self._write(request)
            case RemoveRemote(keys):
                return store.remove(keys)
            case WithdrawClaim(key):
                return store.unclaim(key, self._owner)
            case AskGenerations(()):
                # A probe: without a namespace to ask for, the store would not be asked.
                store.look([_NOBODYS])
                return {}
            case AskGenerations(tags):
                return dict(zip(tags, store.generations(tags), strict=True))
            case RaiseGeneration(tag, least, new):
                [known] = [0] if new else store.generations([tag])
                return known if known >= least else store.raise_generation(tag, least)

    def _seek(self, seek: Seek) -> Sought:
        began = time.monotonic()
        generation, heads = self._store.look(seek.keys)
        answer_s = time.monotonic() - began
        if generation != generation_of(seek.keys[0]):
            return Sought(generation, answer_s=answer_s)
        found = tuple(head for head in takewhile(lambda head: head is not None, heads) if head)
        may_claim = seek.claims_s and not found
        claim = self._store.claim(seek.keys[0], self._owner, seek.claims_s) if may_claim else None
        if claim is None or claim.mine:
            return Sought(generation, found, answer_s, claimed=claim is not None)
        return Sought(generation, found, answer_s, others_s=claim.age_s)

    def _read(self, read: ReadRemote) -> RemoteEntry:
        """Reads an object into its place, where the object's header stands in for the span's until it is stored."""
        key, address, payload_at = read.key, self._store.address, read.ring_offset + SPAN_HEADER_BYTES
        entry = self._store.get_into(key, self._ring[read.ring_offset : payload_at + read.payload_bytes])
        if entry is None:
            # Its header was in order a moment ago. If the payload is damaged, nobody else replaces it.
            self._damaged[key] = None
            while len(self._damaged) > DAMAGED_MAX:
                self._damaged.pop(next(iter(self._damaged)), None)
            raise Corrupt(f"{address}: the object of {key.hex()} is gone, or is not what was stored")
        if entry.payload_bytes != read.payload_bytes:
            raise Corrupt(f"{address}: the object of {key.hex()} was replaced by another meanwhile")
        self._check(payload_at, entry.payload_bytes, entry.tree_bytes)
        return entry

    def _write(self, save: SaveRemote) -> RemoteSaved:
        generation, [there] = self._store.look([save.key])
        damaged = save.key in self._damaged
        has = there is not None and there.payload_bytes == save.payload_bytes and not damaged
        if has or generation != generation_of(save.key):
            return RemoteSaved(generation, written=False)
        start = save.offset + SPAN_HEADER_BYTES
        span = SpanHeader.unpack(bytes(self._ring[save.offset : start]))
        payload = self._ring[start : start + save.payload_bytes]
        entry = RemoteEntry(
            save.payload_bytes,
            span.tree_bytes,
            span.tokens,
            span.cost_ms,
            span.prefix_bytes,
            lives_s=span.expires_s - self._clock() if span.expires_s else None,
            parent=span.parent,
            # Its client may have left the checksum to the scrub, which has not come to it yet.
            checksum=span.checksum or checksum_of(np.frombuffer(payload, np.uint8)),
        )
        self._store.put_from(save.key, payload, entry)
        self._damaged.pop(save.key, None)
        return RemoteSaved(generation)


def remote_turned(turned: RemoteTurned) -> dict[str, Any]:
    """Logs that the store is left alone or refuses writes, or no longer. The event for those who watch."""
    writes = turned.what == "writes"
    if turned.why and writes:
        _log.warning("the remote store takes no writes for now; it is read as before", why=turned.why)
    elif turned.why:
        _log.warning("the remote store is left alone for now; entries of this host are served", why=turned.why)
    else:
        _log.info("the remote store takes writes again" if writes else "the remote store serves again")
    event, field = ("remote_writes", "takes_writes") if writes else ("remote", "serves")
    return {"event": event, field: not turned.why, "why": turned.why}
