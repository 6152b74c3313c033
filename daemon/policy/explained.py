"""A policy's explanation of one entry: why it stays or is evicted.

Owns: the fields of the explanation, and the words for the traits of the learned policy's classes. Does not own the
values (the policies). Imports no policy, so that every policy can import it.
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
    """A policy's knowledge of a stored entry, or of an evicted key that it remembers.

    Args:
        worth: of two entries that may be evicted, the one with the lower worth is evicted first. Comparable only
            between entries of one policy.
        uses: the put and all later uses that the policy counted, including those before an eviction. None: the policy
            does not count uses.
        like: the traits of the entry's class, in words.
        comes_back: the share of entries of that class, unused for as long, that were used again, evicted or not. None:
            too few are known, or the policy does not learn.
        in_window: the entry was put so recently that it is evicted only if no other entry can be.
    """

    worth: float
    uses: int | None = None
    like: tuple[str, ...] = ()
    comes_back: float | None = None
    in_window: bool = False


def times_used(often: int, often_max: int) -> str:
    """The words for the class `often` of uses: 2 ** (often - 1) to 2 ** often - 1 uses after the put."""
    if often < 2:
        return ("not used since it was put", "used once")[often]
    low = 1 << (often - 1)
    return f"used {low} times or more" if often == often_max else f"used {low} to {2 * low - 1} times"


def traits(often: int, often_max: int, deep: int, state: int) -> tuple[str, ...]:
    """The traits of a class of the learned policy, in words.

    Args:
        deep: 0: the first block of a sequence, or no block; 1: near the start of its sequence; 2: far from it.
        state: the state of the entry's agent, as an index into the policy's states.
    """
    depth = ("", "near the start of its sequence", "far into its sequence")[deep]
    return tuple(word for word in (times_used(often, often_max), depth, _AGENT[state]) if word)
