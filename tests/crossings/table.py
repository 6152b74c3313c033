"""The table: which cells there are, and why some make no sense."""

from __future__ import annotations

from typing import Final

from .disturbances import BY_NAME as DISTURBANCES
from .states import BY_NAME as STATES

# (state, disturbance): why the two cannot meet.
REASONS: Final[dict[tuple[str, str], str]] = {}
CELLS: Final = [
    (state, disturbance) for disturbance in DISTURBANCES for state in STATES if (state, disturbance) not in REASONS
]


def name_of(*cell: str) -> str:
    """How a cell is called."""
    return " x ".join(cell)
