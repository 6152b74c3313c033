"""The scrub: looks at payloads in a thread, one after the other, and says whether they are as they were stored.

    entries of a former daemon, unverified ─┐
    entries whose clients took no checksum ─┴→ one at a time → Scrubbed

Until the scrub has come to a recovered entry, every reader checks it itself. A large payload is put without a checksum,
and its header has 0 until then. While clients put, processors and the memory's bandwidth are theirs.

Owns: which slot is looked at next, and what a result changes in the memory. Does not own what follows for an entry that
is not as it was stored (the core). Invariant: nothing is ever ended because it has no checksum.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

from ...shm.index.index import Slot
from ..forms.events import FoundCorrupt
from ..process import logs
from ..process.limits import NO_MEMORY_OR_THREAD
from .segments import Segments

_log, _store_log = logs.logger("tensord"), logs.logger("store")
_SLOTS_AT_ONCE: Final = 256
QUIET_S: Final = 0.05
"""The store is idle once it has carried out no put for this long."""
BUSY_SHARE: Final = 20
"""Until then, looks take at most one part of this many of the time."""
DUE_MAX: Final = 1 << 16
"""Slots that wait. Of more than these, the oldest keep no checksum."""


class Scrubbed(Struct, frozen=True):
    """The payload of a span was checked. `sound`: it is as it was stored, and has this checksum."""

    slot: int
    span_id: int
    sound: bool
    checksum: int


def applied(memory: Segments, scrubbed: Scrubbed) -> FoundCorrupt | None:
    """Applies the result of a look, if the slot still belongs to that span. Returns what the core has to hear."""
    slot = memory.index.read(scrubbed.slot)
    if not slot.published or slot.span_id != scrubbed.span_id:
        return None
    if not scrubbed.sound:
        _store_log.error("the checksum of an entry is wrong; entry evicted", key=slot.key.hex())
        return FoundCorrupt(scrubbed.span_id)
    memory.write_checksum(slot.offset, scrubbed.checksum)
    memory.index.mark(scrubbed.slot, unverified=False)
    return None


class Scrub:
    """Looks at the entries of one ring. `tell` takes the results. `worked_at` gives the time of the store's last put,
    by time.monotonic."""

    def __init__(self, memory: Segments, tell: Callable[[Scrubbed], object], worked_at: Callable[[], float]) -> None:
        self._memory = memory
        self._tell = tell
        self._due: deque[int] = deque(maxlen=DUE_MAX)
        self._wake = asyncio.Event()
        self._begun = asyncio.Event()
        self._worked_at = worked_at
        self._looked_s = 0.0
        """How long the last look took."""

    def begin(self) -> None:
        """The entries of a former daemon are taken over: only then are they marked as unverified."""
        self._begun.set()

    def add(self, slots: Iterable[int]) -> None:
        """The entries in these slots have no checksum. The store calls this when it has nothing else to do."""
        self._due.extend(slots)
        self._wake.set()

    async def run(self) -> None:
        try:
            if self._memory.recovered:
                await self._begun.wait()
                for number, slot in enumerate(self._memory.index.slots()):
                    if number % _SLOTS_AT_ONCE == 0:
                        # Reading all slots takes half a second of the loop at 262,000 entries.
                        await asyncio.sleep(0)
                    if slot.published and slot.unverified:
                        await self._look_at(slot)
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._due:
                    if time.monotonic() < self._worked_at() + QUIET_S:
                        await asyncio.sleep(min(QUIET_S, BUSY_SHARE * self._looked_s))
                    slot = self._memory.index.read(self._due.popleft())
                    if slot.published:
                        await self._look_at(slot)
        except NO_MEMORY_OR_THREAD as error:
            why = str(error) or type(error).__name__
            _log.warning("cannot check entries; each reader checks those that it reads", why=why)

    async def _look_at(self, slot: Slot) -> None:
        begun = time.monotonic()
        sound, checksum = await asyncio.to_thread(self._memory.summed, slot)
        self._looked_s = time.monotonic() - begun
        self._tell(Scrubbed(slot.number, slot.span_id, sound, checksum))
