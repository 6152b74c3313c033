"""What a fork does to this process's lanes and links.

Owns: the table of all lanes that are mapped here, whoever still holds a client of theirs. Does not own what a lane or a
link does about a fork.

A lane with words in use is frozen: parent and child hold views under the same words, so neither clears them. The words
are looked at only after the lane was suspended, and it stays so until the fork is over, so that no thread takes a word
in between; a get copies out meanwhile. The child writes no lane of its parent's, and no inbox.
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
"""Threads between the beginning and the end of a fork. A lane is resumed when there is none."""
# Held for the tables and while a lane is looked at, never while a fork goes on. Reentrant: a signal handler may fork.
_lock = threading.RLock()


def watch(link: Link) -> None:
    """Tells `link` of every fork from now on."""
    with _lock:
        _links.add(link)


def keep(lane: Lane) -> None:
    """Takes care of `lane` at every fork, for as long as it is mapped. To be called before anything is pinned in it."""
    with _lock:
        _lanes.add(lane)
        if _forks:
            lane.suspend()


def lanes() -> list[Lane]:
    """All lanes that are mapped here."""
    with _lock:
        return list(_lanes)


@contextmanager
def none_under_way() -> Iterator[bool]:
    """True where no fork is under way; then none begins within."""
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
    # Another thread of the parent's may hold it.
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
    """Carries `act` out even where a signal handler's exception ends it: the interpreter would fork all the same."""
    try:
        act()
    except BaseException:
        act()
        raise


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
