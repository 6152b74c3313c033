"""All states, in the order of the table."""

from __future__ import annotations

from typing import Final

from .chains import CHAINS
from .grants import GRANTS
from .held import HELD
from .remote import REMOTE
from .state import State
from .under_way import UNDER_WAY

STATES: Final[list[type[State]]] = [*UNDER_WAY, *GRANTS, *HELD, *CHAINS, *REMOTE]
BY_NAME: Final = {state.name: state for state in STATES}
