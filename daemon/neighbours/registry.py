"""All kinds of neighbours, and the question to one of them.

Owns: what a neighbour must be able to do, the kinds with their usual ports, and what a question ends with. Does not own
any adapter, nor when a neighbour is asked (the governor's core), nor in which thread (the governor's actor).

Invariant: whatever a neighbour does ends as a NeighbourFailed or a result, within the time of its `Http`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

from ..governor.forms.limits import NeighbourPlace
from .comfyui import ComfyServer
from .http import Http, NeighbourFailed
from .ollama import OllamaServer
from .vllm import VllmServer


class Neighbour(Protocol):
    """A server that can give memory of its card back. Both methods block; a thread calls them, once each."""

    def busy(self) -> str:
        """Why the neighbour is to be left alone; "" if it is idle and has something to give back.

        Raises:
            NeighbourFailed: it did not say.
        """
        ...

    def free(self) -> str:
        """Has it give its memory back. What it has freed, and when, only the card's gauge shows.

        Returns:
            What it was not asked to give back, and what to do; "" if it was asked for all.

        Raises:
            NeighbourFailed: it refused, or did not answer.
        """
        ...


_ADAPTERS: Final[dict[str, tuple[int, Callable[[Http], Neighbour]]]] = {
    "comfyui": (8188, ComfyServer),
    "ollama": (11434, OllamaServer),
    "vllm": (8000, VllmServer),
}
PORTS: Final = {kind: port for kind, (port, _) in _ADAPTERS.items()}
"""By kind: the port on which such a server usually listens."""


def ask(place: NeighbourPlace, answer_s: float) -> tuple[Literal["done", "busy", "failed"], str]:
    """Asks a neighbour to give its memory back if it is idle. Blocks, for `answer_s` seconds at most; finding the
    address of a host name may take longer.

    Returns:
        The outcome as in NeighbourAnswered, and why it is not "done", or what the neighbour keeps all the same.
    """
    try:
        _, make = _ADAPTERS[place.kind]
        neighbour = make(Http(place.host, place.port, answer_s))
        busy = neighbour.busy()
        if busy:
            return "busy", busy
        return "done", neighbour.free()
    except NeighbourFailed as failed:
        return "failed", str(failed)
    except Exception as error:
        # A mistake of an adapter, or no memory or thread left, is a failure of this neighbour.
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())
