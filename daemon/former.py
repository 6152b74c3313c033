"""What a daemon finds of the one before it: differing sizes, its entries, and spans that are to be checked.

Owns: the order of taking over, and the warnings. Does not own the memory (`Segments`), nor what becomes of an entry
(daemon/recovery).
"""

from __future__ import annotations

import asyncio
from typing import Final

from . import learned_state, logs
from .actors.mailbox import Mailbox
from .actors.messages import Grown, Scrubbed, StoreMessage
from .actors.store import StoreActor
from .config.config import Config
from .process_limits import NO_MEMORY_OR_THREAD
from .replacement import Replacement
from .segments import Segments

_log = logs.logger("tensord")
_SLOTS_AT_ONCE: Final = 256
_SUM_EVERY_S: Final = 0.1


def warn(memory: Segments, config: Config) -> None:
    """Logs where the memory differs from the configuration, and the notices of the start."""
    if memory.former["end"] in ("killed", "failed"):
        _log.warning("the daemon before this one did not stop", **memory.former)
    for notice in memory.notices:
        _log.warning("existing shared memory needs attention", what=notice)
    if memory.shortage:
        have_bytes = memory.superblock.limit_bytes
        _log.error("the ring stays smaller than configured", have_bytes=have_bytes, why=memory.shortage)
    namespaces_max = memory.superblock.geometry.namespaces_max
    if namespaces_max != config.limits.namespaces_max:
        _log.warning(
            "limits.namespaces_max keeps its value from the creation of the memory; to change it, stop the daemon, run "
            "tensorctl purge and start it again",
            have=namespaces_max,
            configured=config.limits.namespaces_max,
        )


def take_over(memory: Segments, store: StoreActor, policy: Replacement) -> None:
    """Takes over the entries of a former daemon. If there are none, allocates the first piece of the ring."""
    if memory.recovered:
        store.recover(lambda: learned_state.load(memory, policy))
        store.inbox.tell_now(Grown(memory.ready_bytes))
    else:
        store.inbox.tell_now(Grown(memory.grow(0, prefault=False)))


async def scrub(memory: Segments, inbox: Mailbox[StoreMessage]) -> None:
    """Checks the spans of a former daemon, one by one. Until a span is checked, every reader checks it itself."""
    for number, slot in enumerate(memory.index.slots()):
        if number % _SLOTS_AT_ONCE == 0:
            # Reading all slots takes half a second of the loop at 262,000 entries.
            await asyncio.sleep(0)
        if not (slot.published and slot.unverified):
            continue
        try:
            sound = await asyncio.to_thread(memory.is_sound, slot)
        except NO_MEMORY_OR_THREAD as error:
            why = str(error) or type(error).__name__
            _log.warning("cannot check recovered entries; each reader checks those that it reads", why=why)
            return
        await inbox.tell(Scrubbed(slot.number, slot.span_id, sound))


async def sum_new(memory: Segments, store: StoreActor) -> None:
    """Computes the checksums of large payloads, which their clients have left to the daemon, while it has nothing else
    to do."""
    while True:
        await asyncio.sleep(_SUM_EVERY_S)
        while store.idle and (found := store.unsummed()) is not None:
            span_id, offset, payload_bytes = found
            try:
                checksum = await asyncio.to_thread(memory.checksum, offset, payload_bytes)
            except NO_MEMORY_OR_THREAD:
                break
            store.summed(span_id, checksum)
