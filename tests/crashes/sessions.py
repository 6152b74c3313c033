"""The kinds of sessions: which points each reaches."""

from __future__ import annotations

from typing import Final

from . import client_rounds, daemon_rounds

KINDS: Final[dict[str, list[str]]] = {
    "large": daemon_rounds.LARGE_POINTS,
    "small": daemon_rounds.SMALL_POINTS,
    "client": client_rounds.POINTS,
}


AnySession = daemon_rounds.Session | client_rounds.Session


def session(kind: str) -> AnySession:
    if kind == "client":
        return client_rounds.Session()
    return daemon_rounds.Session(small=kind == "small")
