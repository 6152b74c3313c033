"""What a daemon finds of the one before it: differing sizes, and its entries.

Owns: the order of taking over, and the warnings. Does not own the memory (`Segments`), nor what becomes of an entry
(daemon/recovery).
"""

from __future__ import annotations

from .actors.messages import Grown
from .actors.store import StoreActor
from .memory import learned_state
from .memory.scrub import Scrub
from .memory.segments import Segments
from .process import logs
from .replacement import Replacement

_log = logs.logger("tensord")


def warn(memory: Segments) -> None:
    """Logs where the memory differs from the configuration, and the notices of the start."""
    if memory.former["end"] in ("killed", "failed"):
        _log.warning("the daemon before this one did not stop", **memory.former)
    for notice in memory.notices:
        _log.warning("existing shared memory needs attention", what=notice)
    if memory.shortage:
        have_bytes = memory.superblock.limit_bytes
        _log.error("the ring stays smaller than configured", have_bytes=have_bytes, why=memory.shortage)


def take_over(memory: Segments, store: StoreActor, policy: Replacement, scrub: Scrub) -> None:
    """Takes over the entries of a former daemon. If there are none, allocates the first piece of the ring."""
    if memory.recovered:

        def taken_over() -> None:
            learned_state.load(memory, policy)
            scrub.begin()

        store.recover(taken_over)
        store.inbox.tell_now(Grown(memory.ready_bytes))
    else:
        store.inbox.tell_now(Grown(memory.grow(0, prefault=False)))
