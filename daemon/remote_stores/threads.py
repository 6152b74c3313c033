"""Carries out the core's effects on the remote store, in threads.

Owns: the threads, the deadlines, and the outcome of each effect. Does not own: what is read or written
(`daemon/remote`), how (`daemon.remote_stores`), nor spans: the core lends the places to read into, and keeps what is
written.

Invariants: every effect has an outcome. An object is read straight into its place, and nothing of it is shown
before its key, its checksum and its tree were checked there. No call of the store is made on the event loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...errors import Corrupt, TensordError
from ...shm.index.keys import generation_of
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import KEY_BYTES, NAMESPACE_TAG_BYTES, SPAN_HEADER_BYTES, SpanHeader
from ..core.effects import (
    AskGenerations,
    RaiseGeneration,
    ReadRemote,
    RemoteTurned,
    RemoveRemote,
    SaveRemote,
    Seek,
    SeekRun,
    WithdrawClaim,
)
from ..core.events import (
    ClaimWithdrawn,
    GenerationRaised,
    GenerationsTold,
    RemoteConnected,
    RemoteFound,
    RemoteRead,
    RemoteSaved,
    RunSought,
    Sought,
)
from ..process.give_way import GivesWay
from ..process.logs import logger
from .form import Meta, RemoteEntry
from .store import RemoteStore

_log = logger("store")
READERS: Final = 8
WRITERS: Final = 2
WRITE_S: Final = 30.0
"""The deadline of a write. Nobody waits for one."""

DAMAGED_MAX: Final = 1024
LIVES_S_LEAST: Final = 0.001
CONNECT_S: Final = 10.0
GRACE_S: Final = 1.0
"""How much longer than its deadline a read may take before it counts as hanging."""
THREAD_NAME: Final = "tensord-remote"
_NOBODYS: Final = bytes(KEY_BYTES)
"""A key that nobody has. To ask for it shows whether the store answers."""

Request = Seek | SeekRun | ReadRemote | SaveRemote | RemoveRemote | WithdrawClaim | AskGenerations | RaiseGeneration
Outcome = (
    Sought
    | ClaimWithdrawn
    | RunSought
    | RemoteRead
    | RemoteSaved
    | RemoteConnected
    | GenerationsTold
    | GenerationRaised
)
_TURNED: Final = {
    "store": (
        "remote",
        "serves",
        "the remote store is left alone for now; entries of this host are served",
        "the remote store serves again",
    ),
    "writes": (
        "remote_writes",
        "takes_writes",
        "the remote store takes no writes for now; it is read as before",
        "the remote store takes writes again",
    ),
    "generations": (
        "remote_generations",
        "takes_generations",
        "the remote store refuses invalidations: other hosts keep the old entries, this host shares no new ones",
        "the remote store has taken all invalidations",
    ),
}
"""By what has turned: the event for watchers, its field, and what is logged when it begins and ends."""

Check = Callable[[int, bytes, int, int, int], object]
"""Checks the tree of a payload in the ring, and the record of a block (`Copier.check`)."""


class RemoteThreads:
    """The threads that use `store`.

    Args:
        ring: (ring_bytes,) uint8.
        report: takes each outcome. It is called in the threads.
        timeout_s: the seconds in which the store must answer a read.
        clock: gives the seconds of `shm.clock`.
        unix_at_zero: gives the Unix time at which `clock` was zero.
    """

    def __init__(
        self,
        store: RemoteStore,
        ring: np.ndarray[Any, np.dtype[np.uint8]],
        check: Check,
        report: Callable[[Outcome], object],
        timeout_s: float,
        *,
        clock: Callable[[], float],
        unix_at_zero: Callable[[], float],
    ) -> None:
        self.timeout_s = timeout_s
        self._store = store
        self._clock = clock
        self._unix_at_zero = unix_at_zero
        self._ring = ring.data
        self._check = check
        self._report = report
        # Names this daemon among all that claim keys in the store.
        self._owner = secrets.token_bytes(16)
        # Keys whose objects could not be read although their headers were in order: they are written anew.
        self._damaged: dict[bytes, None] = {}
        self._reads: set[Future[None]] = set()
        self._closing = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, f"{THREAD_NAME}-read")
        self._gives_way = GivesWay(self._closing) if store.gives_way else None
        self._writers = ThreadPoolExecutor(
            WRITERS, f"{THREAD_NAME}-write", GivesWay.lower_priority if store.gives_way else None
        )

    def connect(self) -> None:
        """Connects in a thread, and reports whether the store answers."""
        self._readers.submit(self._connect)

    def status(self) -> Mapping[str, Any]:
        """The store's address, and what was read from it that is wrong."""
        store = self._store
        return {
            "address": store.address,
            "corrupt": store.corrupt,
            "last_corrupt": store.last_corrupt,
        }

    def submit(self, effect: Request) -> None:
        """Queues an effect. Its deadline runs from now. After `close` it is dropped: entries are still published then,
        which the store is not told of."""
        if self._closing.is_set():
            return
        if not isinstance(effect, SaveRemote | RemoveRemote):
            read = self._readers.submit(self._carry_out, effect, time.monotonic() + self.timeout_s)
            self._reads = {each for each in self._reads if not each.done()} | {read}
        else:
            self._writers.submit(self._write_aside, effect, time.monotonic() + WRITE_S)

    def close(self) -> bool:
        """Drops what is queued, and waits for the reads under way, which write into the ring, until their deadlines.

        Returns:
            False if a read has not ended by then: the ring must not be given to another daemon.
        """
        self._closing.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        ended = not wait(self._reads, self.timeout_s + GRACE_S).not_done
        self._store.close()
        return ended

    def _connect(self) -> None:
        """Connects, and asks for a key that nobody has, so that a wrong address or password shows at the start."""
        deadline = time.monotonic() + CONNECT_S
        try:
            self._store.connect(deadline)
            self._store.heads([_NOBODYS], deadline)
        except TensordError as error:
            outcome = RemoteConnected(error)
        except Exception as error:
            outcome = RemoteConnected(TensordError(f"{self._store.address}: the request failed: {error!r}"))
        else:
            outcome = RemoteConnected()
        if not self._closing.is_set():
            self._report(outcome)

    def _write_aside(self, effect: SaveRemote | RemoveRemote, deadline: float) -> None:
        hurried = not isinstance(effect, SaveRemote) or effect.hurried
        with self._gives_way.working(hurried=hurried) if self._gives_way is not None else nullcontext():
            self._carry_out(effect, deadline)

    def _carry_out(self, effect: Request, deadline: float) -> None:
        try:
            outcome = self._outcome(effect, deadline)
        except TensordError as error:
            outcome = _failed(effect, error)
        except Exception as error:
            # The error concerns one effect. The core must get an outcome, or its span is never freed.
            outcome = _failed(effect, TensordError(f"{self._store.address}: the request failed: {error!r}"))
        self._report(outcome)

    def _outcome(self, effect: Request, deadline: float) -> Outcome:
        match effect:
            case Seek():
                return self._seek(effect, deadline)
            case SeekRun():
                return self._seek_run(effect, deadline)
            case ReadRemote():
                return self._read(effect, deadline)
            case SaveRemote():
                return self._write(effect, deadline)
            case RemoveRemote(number, keys):
                self._store.remove(keys, deadline)
                return RemoteSaved(number)
            case WithdrawClaim(key):
                return ClaimWithdrawn(bool(self._store.unclaim(key, self._owner, deadline)))
            case AskGenerations(()):
                # A probe: without a namespace to ask for, the store would not be asked.
                self._store.heads([_NOBODYS], deadline)
                return GenerationsTold({})
            case AskGenerations(tags):
                return GenerationsTold(dict(zip(tags, self._store.generations(tags, deadline), strict=True)))
            case RaiseGeneration(tag, least, new):
                [known] = [0] if new else self._store.generations([tag], deadline)
                return GenerationRaised(
                    tag, known if known >= least else self._store.raise_generation(tag, least, deadline)
                )

    def _generation(self, effect: Seek | SeekRun | SaveRemote, deadline: float) -> int | None:
        """The store's generation of the key's namespace; None if it is not asked for."""
        if not effect.asks_generation:
            return None
        [generation] = self._store.generations([effect.key[:NAMESPACE_TAG_BYTES]], deadline)
        return generation

    def _seek(self, seek: Seek, deadline: float) -> Sought:
        began = time.monotonic()
        generation = self._generation(seek, deadline)
        if generation not in (None, generation_of(seek.key)):
            return Sought(seek.number, generation=generation, answer_s=time.monotonic() - began)
        [head] = self._store.heads([seek.key], deadline)
        answer_s = time.monotonic() - began
        if head is not None:
            return Sought(seek.number, self._found(head), generation=generation, answer_s=answer_s)
        claim = self._store.claim(seek.key, self._owner, seek.claims_s, deadline) if seek.claims_s else None
        return Sought(
            seek.number,
            generation=generation,
            answer_s=answer_s,
            claimed=claim is not None and claim.mine,
            others_s=None if claim is None or claim.mine else claim.age_s,
        )

    def _seek_run(self, seek: SeekRun, deadline: float) -> RunSought:
        began = time.monotonic()
        generation = self._generation(seek, deadline)
        heads: list[RemoteEntry | None] = []
        if generation in (None, generation_of(seek.key)):
            heads = self._store.heads(seek.keys, deadline)
        found = []
        for head in heads:
            if head is None:
                break
            found.append(self._found(head))
        return RunSought(seek.number, tuple(found), generation=generation, answer_s=time.monotonic() - began)

    def _found(self, head: RemoteEntry) -> RemoteFound:
        meta = head.meta
        lives_s = None
        if meta.expires_unix_s:
            lives_s = max(meta.expires_unix_s - self._unix_at_zero() - self._clock(), LIVES_S_LEAST)
        return RemoteFound(
            head.payload_bytes, meta.tree_bytes, meta.tokens, meta.cost_ms, meta.prefix_bytes, lives_s, meta.parent
        )

    def _read(self, read: ReadRemote, deadline: float) -> RemoteRead:
        """Reads an object into its place, where the object's header stands in for the span's until it is stored."""
        key, found, address = read.key, read.found, self._store.address
        payload_at = read.ring_offset + SPAN_HEADER_BYTES
        entry = self._store.get_into(key, self._ring[read.ring_offset : payload_at + found.payload_bytes], deadline)
        if entry is None:
            # Its header was in order a moment ago. If the payload is damaged, nobody else replaces it.
            self._damaged[key] = None
            while len(self._damaged) > DAMAGED_MAX:
                self._damaged.pop(next(iter(self._damaged)), None)
            raise Corrupt(f"{address}: the object of {key.hex()} is gone, or is not what was stored")
        if not _fits(entry, found):
            raise Corrupt(f"{address}: the object of {key.hex()} was replaced by another meanwhile")
        self._check(payload_at, key, found.payload_bytes, found.tree_bytes, found.prefix_bytes)
        return RemoteRead(read.number, entry.meta.checksum)

    def _write(self, save: SaveRemote, deadline: float) -> RemoteSaved:
        generation = self._generation(save, deadline)
        if generation not in (None, generation_of(save.key)):
            return RemoteSaved(save.number, written=False, generation=generation)
        start = save.offset + SPAN_HEADER_BYTES
        header = SpanHeader.unpack(bytes(self._ring[save.offset : start]))
        if not header.checksum:
            # Its client has left the checksum to the scrub, which has not come to it yet.
            header = replace(
                header, checksum=checksum_of(np.frombuffer(self._ring[start : start + save.payload_bytes], np.uint8))
            )
        meta = Meta.of_span(header, self._unix_at_zero())
        [there] = self._store.heads([save.key], deadline)
        damaged = save.key in self._damaged
        if there is not None and there.payload_bytes == save.payload_bytes and not damaged:
            return RemoteSaved(save.number, written=False, generation=generation)
        self._store.put_from(save.key, self._ring[start : start + save.payload_bytes], meta, deadline)
        self._damaged.pop(save.key, None)
        return RemoteSaved(save.number, generation=generation)


def remote_turned(turned: RemoteTurned) -> dict[str, Any]:
    """Logs that the store is left alone or refuses writes, or no longer. The event for those who watch."""
    event, field, begins, ends = _TURNED[turned.what]
    if turned.why:
        _log.warning(begins, why=turned.why)
    else:
        _log.info("the remote store was reached for the first time" if turned.first else ends)
    return {"event": event, field: not turned.why, "why": turned.why}


def _fits(entry: RemoteEntry, found: RemoteFound) -> bool:
    """Whether an object is the one whose header was read before."""
    meta = entry.meta
    had = entry.payload_bytes, meta.tree_bytes, meta.tokens, meta.prefix_bytes, meta.parent
    return had == (found.payload_bytes, found.tree_bytes, found.tokens, found.prefix_bytes, found.parent)


def _failed(effect: Request, error: TensordError) -> Outcome:
    match effect:
        case Seek(number):
            return Sought(number, error=error)
        case SeekRun(number):
            return RunSought(number, error=error)
        case ReadRemote(number):
            return RemoteRead(number, error=error)
        case SaveRemote(number) | RemoveRemote(number):
            return RemoteSaved(number, error)
        case WithdrawClaim():
            return ClaimWithdrawn(False)
        case AskGenerations():
            return GenerationsTold({}, error)
        case RaiseGeneration(tag):
            return GenerationRaised(tag, error=error)
