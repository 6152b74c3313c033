"""Fork handling for this process's lanes and links.

Owns: the tables of all mapped lanes, also of closed clients, and of all links. Does not own: what a lane or a link does
about a fork.
Invariants: a lane with words in use is frozen at a fork. Parent and child then hold views under the same words, so
neither clears them. A lane is suspended before its words are read, and until the fork is over, so that no thread takes
a word in between; a get copies the payload meanwhile. The child writes no lane and no inbox of its parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from ...shm import unshared
from ...shm.lanes import Lane

if TYPE_CHECKING:
    from .link import Link

_links: WeakSet[Link] = WeakSet()
_lanes: WeakSet[Lane] = WeakSet()
_forks = 0
"""How many forks are under way. Lanes are resumed when there is none."""
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
        if _forks:
            lane.suspend()


def lanes() -> list[Lane]:
    """All lanes that are mapped in this process."""
    with _lock:
        return list(_lanes)


@contextmanager
def none_under_way() -> Iterator[bool]:
    """Yields True if no fork is under way; then none begins within the block."""
    with _lock:
        yield not _forks


def _before() -> None:
    global _forks
    with _lock:
        _forks += 1
        _surely(_give_up_lanes)


def _in_parent() -> None:
    global _forks
    with _lock:
        _forks -= 1
        if not _forks:
            _surely(_resume_lanes)
        links = list(_links)
    for link in links:
        link.after_fork_in_parent()


def _in_child() -> None:
    global _forks, _lock
    # A thread of the parent may have held the lock at the fork.
    _lock = threading.RLock()
    _forks = 0
    _surely(unshared.after_fork_in_child)
    _surely(_leave_lanes_to_parent)


def _give_up_lanes() -> None:
    for lane in list(_lanes):
        lane.suspend()
        if lane.in_use:
            lane.freeze()
    for link in list(_links):
        link.before_fork()


def _resume_lanes() -> None:
    for lane in list(_lanes):
        lane.resume()


def _leave_lanes_to_parent() -> None:
    for lane in list(_lanes):
        lane.freeze()
    for link in list(_links):
        link.after_fork_in_child()


def _surely(act: Callable[[], None]) -> None:
    """Calls `act`, again if a signal handler's exception ends it: the interpreter forks in either case."""
    try:
        act()
    except BaseException:
        act()
        raise


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
