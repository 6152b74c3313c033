"""All kinds of neighbours, and the question to one of them.

Owns: the kinds with their usual ports, and what a question ends with. Does not own any adapter, nor when a neighbour is
asked (the governor's core), nor in which thread and for how long (the governor's actor).

Invariant: whatever a neighbour answers ends as an outcome, and a reason of one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from ..governor.forms.limits import NeighbourPlace
from .comfyui import free_comfyui
from .http import Http, NeighbourBusy, NeighbourFailed
from .ollama import free_ollama
from .vllm import free_vllm

Free = Callable[[Http], str]
"""Has a neighbour give the memory of its card back, if it is idle. What it has freed, and when, only the card's gauge
shows. Returns what it was not asked to give back, and what to do; "" if it was asked for all. Raises NeighbourBusy, or
NeighbourFailed."""

_REASON_CHARS_MAX: Final = 160
_KINDS: Final[dict[str, tuple[int, Free]]] = {
    "comfyui": (8188, free_comfyui),
    "ollama": (11434, free_ollama),
    "vllm": (8000, free_vllm),
}
PORTS: Final = {kind: port for kind, (port, _) in _KINDS.items()}
"""By kind: the port on which such a server usually listens."""


def ask(place: NeighbourPlace, answer_s: float) -> tuple[Literal["done", "busy", "failed"], str]:
    """Asks a neighbour to give its memory back if it is idle. Blocks.

    Returns:
        The outcome as in NeighbourAnswered, and why it is not "done", or what the neighbour keeps all the same.
    """
    _, free = _KINDS[place.kind]
    try:
        return "done", free(Http(place.host, place.port, answer_s))
    except NeighbourBusy as busy:
        return "busy", str(busy)
    except Exception as error:
        # A mistake of an adapter, or no memory left, is a failure of this neighbour.
        said = str(error) if isinstance(error, NeighbourFailed) else f"{type(error).__name__}: {error}"
        line = " ".join(said.split())[:_REASON_CHARS_MAX]
        return "failed", "".join(letter if letter.isprintable() else "?" for letter in line)
