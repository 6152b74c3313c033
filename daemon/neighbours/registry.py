"""All kinds of neighbours, with their usual ports, and the question to one of them.

The governor's core says when a neighbour is asked; its actor has the thread, and the time of a question.

Invariant: whatever a neighbour answers ends as an outcome, and a reason of one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from ..governor.forms.limits import NeighbourPlace
from .http import Http, NeighbourBusy, NeighbourFailed
from .servers import free_comfyui, free_ollama, free_vllm

_REASON_CHARS_MAX: Final = 160
_KINDS: Final[dict[str, tuple[int, Callable[[Http], None]]]] = {
    "comfyui": (8188, free_comfyui),
    "ollama": (11434, free_ollama),
    "vllm": (8000, free_vllm),
}
PORTS: Final = {kind: port for kind, (port, _) in _KINDS.items()}
"""By kind: the port on which such a server usually listens."""


def ask(place: NeighbourPlace, answer_s: float) -> tuple[Literal["done", "busy", "failed"], str]:
    """Asks a neighbour to give its memory back if it is idle. Blocks. Returns the outcome as in NeighbourAnswered, and
    why it is not "done"."""
    _, free = _KINDS[place.kind]
    try:
        free(Http(place.host, place.port, answer_s))
        return "done", ""
    except NeighbourBusy as busy:
        return "busy", str(busy)
    except Exception as error:
        # A mistake in `servers`, or no memory left, is a failure of this neighbour.
        said = str(error) if isinstance(error, NeighbourFailed) else f"{type(error).__name__}: {error}"
        line = " ".join(said.split())[:_REASON_CHARS_MAX]
        return "failed", "".join(letter if letter.isprintable() else "?" for letter in line)
