"""Which threads are within a put.

A signal handler, or a finalizer, runs in the middle of whatever its thread does. Within a put that thread has locks of
the client, and may have changed half of what they guard. So the handler may neither put with the same client, nor wait
without a limit for another thread that needs these locks.

Owns: the table of these threads. Does not own: what is refused or not waited for (puts.py, aside.py, calls/base.py).
Invariants: the table is changed in single steps, without a lock.
"""

from __future__ import annotations

import _thread

from ...errors import LimitReached

under_way: set[tuple[int, object]] = set()
"""A thread and the sender of its put, for each put under way."""


def within(sender: object) -> bool:
    """Whether this thread is within a put of `sender`."""
    return (_thread.get_ident(), sender) in under_way


def within_any() -> bool:
    """Whether this thread is within a put of any client."""
    thread = _thread.get_ident()
    return any(each == thread for each, _ in list(under_way))


def check(sender: object) -> None:
    """For a call that a put of the same client in the same thread cannot go on without.

    Raises:
        LimitReached: this thread is within a put of `sender`.
    """
    if within(sender):
        raise refusal()


def refusal() -> LimitReached:
    """The error of a call within a put."""
    return LimitReached(
        "a signal handler has interrupted a put of this client in its own thread, and calls the client in turn: make "
        "the call once the handler has returned, or in another thread. Lookups and close work"
    )


def after_fork_in_child() -> None:
    """After a fork: the puts of other threads belong to the parent."""
    thread = _thread.get_ident()
    for each in list(under_way):
        if each[0] != thread:
            under_way.discard(each)
