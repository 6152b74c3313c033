"""Fork handling of the client: what is done at a fork, and in which order.

Before the fork: the lanes are suspended, and frozen if views are in use; then the links give up frozen lanes. In the
parent: the lanes are resumed, then the links attach anew. In the child: the lanes, the links, the threads of aside.py,
then the objects that `follow` a fork. The lanes of closed clients are among them.

Invariants: a lane with words of views in use is frozen at a fork. Parent and child then hold views under the same
words, so neither clears them. Grants stay the parent's: the child does not share the memory behind them. A lane is
suspended before its words are read, and until the fork is over, so that no thread takes a word in between; a get copies
the payload meanwhile. The child writes no lane, no queue and no inbox of its parent. An exception of a signal handler
prevents none of this: the interpreter reports it and forks all the same, so each handler is registered ATTEMPTS times,
and may be repeated.
"""

from __future__ import annotations

# Not used: its fork handlers have to be registered before those below, which may log. In the child it renews its locks.
import logging  # noqa: F401
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from ...shm.lanes.lane import Lane
from ...shm.ring import unshared
from . import aside

if TYPE_CHECKING:
    from ..link.link import Link


_links: WeakSet[Link] = WeakSet()
_followers: WeakSet[Any] = WeakSet()
_lanes: WeakSet[Lane] = WeakSet()
_under_way: Final[list[None]] = []
"""One element for each fork under way. Lanes are resumed when there is none. Changed by functions of the interpreter
alone, which no signal handler interrupts."""
ATTEMPTS: Final = 3
"""Signal handlers that may raise within one step of a fork, less one. An attempt takes microseconds."""
# Held while a table or a lane is read, never during the fork itself. Reentrant: a signal handler may fork.
_lock = threading.RLock()


def watch(link: Link) -> None:
    """Calls `link` at every fork from now on."""
    with _lock:
        _links.add(link)


def keep(lane: Lane) -> None:
    """Handles `lane` at every fork for as long as it is mapped. Call it before the first pin in the lane."""
    with _lock:
        _lanes.add(lane)
        if _under_way:
            lane.suspend()


def follow(follower: Any) -> None:
    """Calls `after_fork_in_child` of `follower` at every fork from now on."""
    _followers.add(follower)


def lanes() -> list[Lane]:
    """All lanes that are mapped in this process."""
    with _lock:
        return list(_lanes)


@contextmanager
def none_under_way() -> Iterator[bool]:
    """Yields True if no fork is under way; then none begins within the block."""
    with _lock:
        yield not _under_way


def _before() -> None:
    with _lock:
        for lane in list(_lanes):
            lane.suspend()
            if lane.in_use_by_views:
                lane.freeze()
        for link in list(_links):
            link.before_fork()


def _in_parent() -> None:
    with _lock:
        if not _under_way:
            for lane in list(_lanes):
                lane.resume()
        links = list(_links)
    for link in links:
        link.after_fork_in_parent()


def _in_child() -> None:
    global _lock
    # A thread of the parent may have held the lock at the fork.
    _lock = threading.RLock()
    unshared.after_fork_in_child()
    for lane in list(_lanes):
        lane.freeze()
    for link in list(_links):
        link.after_fork_in_child()
    aside.after_fork_in_child()
    for follower in list(_followers):
        follower.after_fork_in_child()


# The interpreter calls the handlers after a fork in the order in which they are registered, those before a fork in the
# reverse order. Each is registered by itself: the interpreter reports an exception of one, and calls the next.
os.register_at_fork(after_in_parent=_under_way.pop, after_in_child=_under_way.clear)
for _ in range(ATTEMPTS):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
os.register_at_fork(before=partial(_under_way.append, None))
