"""The states: what a process holds, or has under way, at the time of a disturbance.

A new way to put, or a new kind of lease, needs one more class in `under_way.py`, `held.py` or another module of states,
and a line in the list there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .payloads import KIB

if TYPE_CHECKING:
    from .party import Party


class State:
    """Lives in the party's process. After a fork the child has a copy.

    `under_way`: entered while the daemon is stopped, so that the daemon has not read the messages yet. `size_bytes`:
    the size of the array that the state puts.
    """

    name: ClassVar[str]
    under_way: ClassVar[bool] = False
    size_bytes: ClassVar[int] = 256 * KIB

    def __init__(self, party: Party) -> None:
        self.party = party

    def prepare(self) -> None:
        """Prepares `enter`. The daemon serves."""

    def enter(self) -> None:
        raise NotImplementedError  # each class has its own

    def settle(self) -> None:
        """Waits, after the disturbance and with a daemon that serves, until every pending call has an outcome."""

    def check(self) -> None:
        """Asserts that every byte held is right. Runs in both processes after a fork."""

    def in_child(self) -> None:
        """Uses the copies in the child of a fork, beyond reading them."""
        self.check()

    def drop(self) -> None:
        """Releases everything. Runs in both processes after a fork."""
        raise NotImplementedError  # each class has its own
