"""Fork handling of the client: what is done at a fork, and in which order.

Before the fork: the lanes are suspended, and frozen if words are in use; then the links give up frozen lanes. In the
parent: the lanes are resumed, then the links attach anew. In the child: the lanes, the links, the threads of aside.py,
then the objects that `follow` a fork, by their `Place`.

Owns: this order, and the tables of all mapped lanes, also of closed clients, of all links, and of the objects that
follow a fork. Does not own: what each of them does about a fork.
Invariants: a lane with words in use is frozen at a fork. Parent and child then hold views under the same words, so
neither clears them. A lane is suspended before its words are read, and until the fork is over, so that no thread takes
a word in between; a get copies the payload meanwhile. The child writes no lane and no inbox of its parent.
"""

from __future__ import annotations

# Not used: its fork handlers have to be registered before those below, which may log. In the child it renews its locks.
import logging  # noqa: F401
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from ...shm import unshared
from ...shm.lanes import Lane
from . import aside

if TYPE_CHECKING:
    from .link import Link


class Place(IntEnum):
    """The place of a kind of object among the handlers in the child."""

    PAGED_SNAPSHOTS = 1
    DEVICE_SEQUENCES = 2
    VISUAL_CACHES = 3
    HELD_LEASES = 4
    LENDERS = 5
    PROCESSOR_CACHES = 6


class Follower(Protocol):
    """An object whose locks, threads or contents the child cannot share with the parent."""

    def after_fork_in_child(self) -> None:
        """Called in the child of a fork."""


_links: WeakSet[Link] = WeakSet()
_followers: Final[dict[Place, WeakSet[Follower]]] = {place: WeakSet() for place in sorted(Place)}
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


def follow(follower: Follower, place: Place) -> None:
    """Calls `after_fork_in_child` of `follower` at every fork from now on."""
    _followers[place].add(follower)


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


def _followers_in_child(place: Place) -> None:
    for follower in list(_followers[place]):
        follower.after_fork_in_child()


def _surely(act: Callable[[], None]) -> None:
    """Calls `act`, again if a signal handler's exception ends it: the interpreter forks in either case."""
    try:
        act()
    except BaseException:
        act()
        raise


# The interpreter calls the handlers in the child in the order in which they are registered. Each is registered by
# itself: the interpreter reports an exception of one, and calls the next.
os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
os.register_at_fork(after_in_child=aside.after_fork_in_child)
for _place in _followers:
    os.register_at_fork(after_in_child=partial(_followers_in_child, _place))
