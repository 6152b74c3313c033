"""The traits of an entry that form the classes of the learned policy.

The traits are: how often the entry was used, its depth in its sequence, and the time without a use before its last use.
Together they are one number below TRAITS.

Owns: the classes of each trait, and their encoding. Does not own the records (`records`). Pure.
"""

from __future__ import annotations

from typing import Final

OFTEN_MAX: Final = 4
"""The highest class of uses: all entries with 2 ** (OFTEN_MAX - 1) or more uses after the put."""
FAR: Final = 8
"""The depth from which all blocks of a sequence are in one class."""
GAPS: Final = 8
"""The number of classes of times without a use."""
TRAITS: Final = (OFTEN_MAX + 1) * 3 * GAPS
"""The number of combinations."""


def often(uses: int) -> int:
    """The class of a number of uses, the put included. Classes are powers of two; 0: the put only."""
    return min((uses - 1).bit_length(), OFTEN_MAX)


def gap_of(unused: float) -> int:
    """The class of a time without a use, in mean pauses. Classes are powers of eight."""
    return min((int(unused * 20).bit_length() + 2) // 3, GAPS - 1)


def traits_of(uses: int, depth: int, gap: int) -> int:
    """Uses, depth (0, near, far) and gap as one number."""
    deep = 0 if not depth else 1 if depth < FAR else 2
    return (often(uses) * 3 + deep) * GAPS + gap
