"""The kinds of sessions: which points each reaches."""

from __future__ import annotations

from typing import Final

from . import daemon_rounds

KINDS: Final[dict[str, list[str]]] = {
    "large": daemon_rounds.LARGE_POINTS,
    "small": daemon_rounds.SMALL_POINTS,
}


def session(kind: str) -> daemon_rounds.Session:
    """A new instance for rounds of that kind."""
    return daemon_rounds.Session(small=kind == "small")
