"""All states, and the table: each of them with every disturbance."""

from __future__ import annotations

from typing import Final

from .chains import CHAINS
from .disturbances import BY_NAME as DISTURBANCES
from .grants import GRANTS
from .held import HELD
from .remote import REMOTE
from .state import State
from .under_way import UNDER_WAY

STATES: Final[list[type[State]]] = [*UNDER_WAY, *GRANTS, *HELD, *CHAINS, *REMOTE]
BY_NAME: Final = {state.name: state for state in STATES}
CELLS: Final = [(state, disturbance) for disturbance in DISTURBANCES for state in BY_NAME]


def name_of(*cell: str) -> str:
    return " x ".join(cell)
