"""The traits of an entry by which the learned policy forms classes: how often it was used, how deep in its sequence it
lies, and how long it was unused before its last use. The three make one number below TRAITS.
"""

from __future__ import annotations

from typing import Final

OFTEN_MAX: Final = 4
"""Of what was used more than two to the power of this, all is alike."""
FAR: Final = 8
"""Blocks deeper in a sequence than this are all alike."""
GAPS: Final = 8
TRAITS: Final = (OFTEN_MAX + 1) * 3 * GAPS
"""How many combinations there are."""


def often(uses: int) -> int:
    """The class of a number of uses: uses count by powers of two."""
    return min((uses - 1).bit_length(), OFTEN_MAX)


def gap_of(unused: float) -> int:
    """The class of a time without a use, in mean pauses: gaps count by powers of eight."""
    return min((int(unused * 20).bit_length() + 2) // 3, GAPS - 1)


def traits_of(uses: int, depth: int, gap: int) -> int:
    """Uses, depth (first, near, far) and gap as one number."""
    deep = 0 if not depth else 1 if depth < FAR else 2
    return (often(uses) * 3 + deep) * GAPS + gap
