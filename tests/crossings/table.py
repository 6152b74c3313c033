"""The table: the cells, and the reasons why some pairs have none."""

from __future__ import annotations

from typing import Final

from .disturbances import BY_NAME as DISTURBANCES
from .states import BY_NAME as STATES

# (state, disturbance): the reason why the two exclude each other.
REASONS: Final[dict[tuple[str, str], str]] = {}
CELLS: Final = [
    (state, disturbance) for disturbance in DISTURBANCES for state in STATES if (state, disturbance) not in REASONS
]


def name_of(*cell: str) -> str:
    """The name of a cell."""
    return " x ".join(cell)
