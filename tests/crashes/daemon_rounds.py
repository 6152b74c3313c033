"""Rounds in which the daemon dies at a crash point, restarts, and is compared with the model.

Owns: which load reaches which points, and the course of one round. Each round has its own seed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Final, Self

from . import client_rounds
from .instance import Ended, Instance
from .points import DAEMON, Round, points_of

CALLS: Final = 30
RECOVERIES: Final = 3
"""How many times in a row a daemon dies during recovery."""
_OVER_MEMORY: Final = ("recovery", "creation", "resize")
"""Groups in which the daemon dies before it serves; each daemon of such a round dies."""
_ARM: Final = "tests.crashes.points:arm"

Call = Callable[[Instance, random.Random], None]

_OTHERS: Final = (Instance.reserve, Instance.compute, Instance.hold, Instance.evict, Instance.sequence)
_MIXED: Final[tuple[Call, ...]] = (*(Instance.put,) * 4, *_OTHERS)
_OFTEN: Final[dict[str, tuple[Call, ...]]] = {
    "commit": (Instance.put, Instance.reserve, Instance.sequence),
    "lend": (Instance.put, Instance.ask_and_leave),
    "evict": (Instance.evict, Instance.clear),
    "attach": (Instance.attach,),
    "touch": (Instance.touch,),
    "invalidate": (Instance.invalidate,),
    "offload": (*(Instance.device,) * 3, Instance.fill_card),
}
_SMALL: Final[tuple[Call, ...]] = (*(Instance.put,) * 4, Instance.hold)
_SMALL_GROUPS: Final = ("reclaim", "pages")
KINDS: Final[dict[str, list[str]]] = {
    "large": points_of({group: DAEMON[group] for group in DAEMON if group not in _SMALL_GROUPS}),
    "small": points_of({group: DAEMON[group] for group in _SMALL_GROUPS}),
    "client": client_rounds.POINTS,
}
"""The points that each kind of session reaches."""


class Session:
    """One instance for any number of rounds; a context manager."""

    def __init__(self, *, small: bool) -> None:
        self._instance = Instance(small=small)

    @property
    def checked(self) -> int:
        """The number of entries that were compared with the model."""
        return self._instance.model.checked

    def __enter__(self) -> Self:
        self._instance.__enter__()
        self._start()
        self._load("commit", random.Random(0))
        self._instance.daemon.kill()
        return self

    def __exit__(self, *_: object) -> None:
        self._instance.__exit__()

    def play(self, turn: Round) -> tuple[str, ...]:
        """Plays one round, which begins and ends without a daemon. The next one checks the memory of the last crash.
        Returns the places at which daemons died; none if the load did not reach the line and a kill from outside ended
        the round. Raises AssertionError if an entry is lost, torn or wrong, or something leaked."""
        instance, chance = self._instance, random.Random(turn.seed)
        daemon = instance.daemon
        told = daemon.folder / "places"
        told.unlink(missing_ok=True)
        lines = [turn.at]  # at which each daemon of the round dies
        if turn.group in _OVER_MEMORY:
            self._prepare(turn, chance)
            lines += [chance.randint(1, turn.at) for _ in range(RECOVERIES - 1)]
        for at in lines:
            if turn.group == "resize":
                instance.resize(chance)
            daemon.before = _ARM, {"patterns": [turn.pattern], "at": at, "told": str(told)}
            self._start()
            if turn.group == "removal":
                daemon.interrupt()
                instance.forget()
            elif daemon.running:
                self._load(turn.group, chance)
            daemon.kill()
        daemon.before = None
        return tuple(told.read_text().split()) if told.exists() else ()

    def finish(self) -> None:
        """Checks the memory after the last crash, and that all of it can be freed. Raises AssertionError as `play`."""
        self._start()
        self._instance.finish()

    def _prepare(self, turn: Round, chance: random.Random) -> None:
        """Leaves memory in the middle of a load, without a daemon; for a creation, leaves no memory."""
        self._start()
        if turn.group == "creation":
            self._instance.daemon.interrupt()
            self._instance.forget()
            return
        self._load(turn.group, chance, settle=False)
        self._instance.daemon.kill()

    def _start(self) -> None:
        """Starts the next daemon, and compares its entries with the model if it serves."""
        with contextlib.suppress(Ended):
            if self._instance.daemon.try_start():
                self._instance.check()

    def _load(self, group: str, chance: random.Random, *, settle: bool = True) -> None:
        """Makes CALLS calls, or fewer if the daemon ends; with `settle`, waits for their answers."""
        calls = _SMALL if self._instance.small else (*_MIXED, *_OFTEN.get(group, ()) * 4)
        if group == "pages":
            calls = (*_SMALL, *(Instance.limit,) * 2)
        with contextlib.suppress(Ended):
            for _ in range(CALLS):
                chance.choice(calls)(self._instance, chance)
            if settle:
                self._instance.settle()


AnySession = Session | client_rounds.Session


def session(kind: str) -> AnySession:
    return client_rounds.Session() if kind == "client" else Session(small=kind == "small")
