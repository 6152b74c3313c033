"""What a policy says of one entry when somebody asks why it stays or goes. Imports no policy, so that every policy may.

Owns: the answer's fields, and the words for the traits by which the learned policy tells entries apart.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

_AGENT: Final = (
    "",
    "used by several agents",
    "its agent runs",
    "its agent waits for a tool",
    "its agent's turn has ended",
    "its agent has finished",
)


class Explained(Struct, frozen=True):
    """What a policy knows of a stored entry, or of a key that it remembers after an eviction.

    Args:
        worth: of two entries that may go, the one that is worth less goes first. Compares entries of one policy only.
        uses: the put and all later uses that the policy counted, also those before an eviction; None: it counts none.
        like: the traits of the entry's class, in words.
        comes_back: of entries of that class that were unused for as long, the share that was used again, evicted or
            not; None: too few are known, or the policy does not learn.
        in_window: the entry was put so lately that it goes only if nothing else may.
    """

    worth: float
    uses: int | None = None
    like: tuple[str, ...] = ()
    comes_back: float | None = None
    in_window: bool = False


def times_used(often: int, often_max: int) -> str:
    """The words for entries with 2 ** (often - 1) to 2 ** often - 1 uses after the put."""
    if often < 2:
        return ("not used since it was put", "used once")[often]
    low = 1 << (often - 1)
    return f"used {low} times or more" if often == often_max else f"used {low} to {2 * low - 1} times"


def traits(often: int, often_max: int, deep: int, state: int) -> tuple[str, ...]:
    """The traits of a class of the learned policy, in words.

    Args:
        deep: 0: the first block of a sequence, or no block; 1: near the start of its sequence; 2: far from it.
        state: of its agent, as an index into the states of that policy.
    """
    depth = ("", "near the start of its sequence", "far into its sequence")[deep]
    return tuple(word for word in (times_used(often, often_max), depth, _AGENT[state]) if word)
