"""All kinds of neighbours: their names and usual ports, and the question to one of them.

Owns: the import of every module of this package, by which each adapter registers itself (`neighbour.offer`). Does not
own the adapters.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final, Literal

from ..governor.forms.limits import NeighbourPlace
from .http import Http, NeighbourFailed
from .neighbour import ADAPTERS

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f".{_module.name}", __package__)

PORTS: Final = {kind: ADAPTERS[kind].port for kind in sorted(ADAPTERS)}
"""By kind: the port on which such a server usually listens."""


def ask(place: NeighbourPlace, answer_s: float) -> tuple[Literal["done", "busy", "failed"], str]:
    """Asks a neighbour to give its memory back if it is idle. Blocks, for `answer_s` seconds at most; finding the
    address of a host name may take longer.

    Returns:
        The outcome as in NeighbourAnswered, and why it is not "done", or what the neighbour keeps all the same.
    """
    try:
        neighbour = ADAPTERS[place.kind].make(Http(place.host, place.port, answer_s))
        busy = neighbour.busy()
        if busy:
            return "busy", busy
        return "done", neighbour.free()
    except NeighbourFailed as failed:
        return "failed", str(failed)
    except Exception as error:
        # A mistake of an adapter, or no memory or thread left, is a failure of this neighbour.
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())
