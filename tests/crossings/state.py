"""What one process holds, or has under way, when a disturbance meets it.

A new put path, or a new kind of lease, needs one more class in `under_way.py` or `held.py`, and a line
in the list there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .payloads import KIB

if TYPE_CHECKING:
    from .party import Party


class State:
    """Lives in the party's process. After a fork the child has a copy.

    `under_way`: entered while the daemon is stopped, so that the daemon has yet to read what it is sent. `size_bytes`:
    of the array that it puts.
    """

    name: ClassVar[str]
    under_way: ClassVar[bool] = False
    size_bytes: ClassVar[int] = 256 * KIB

    def __init__(self, party: Party) -> None:
        self.party = party

    def prepare(self) -> None:
        """Whatever `enter` needs. The daemon serves."""

    def enter(self) -> None:
        """Begins to hold."""
        raise NotImplementedError  # every one has its own

    def settle(self) -> None:
        """After the disturbance; the daemon serves: waits until it is known what became of what was under way."""

    def check(self) -> None:
        """Asserts that every byte held is right. In both processes after a fork."""

    def in_child(self) -> None:
        """What the child of a fork does with its copies: more than look at them."""
        self.check()

    def drop(self) -> None:
        """Lets go of all of it. In both processes after a fork."""
        raise NotImplementedError  # every one has its own
