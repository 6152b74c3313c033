"""Rounds in which the daemon dies at a crash point, restarts, and is compared with the model.

Owns: which load reaches which points, and the course of one round. Each round has its own seed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Final, Self

from .instance import Ended, Instance
from .points import DAEMON, Round, points_of

CALLS: Final = 30
RECOVERIES: Final = 3
"""How many times in a row a daemon dies during recovery."""
_OVER_MEMORY: Final = ("recovery", "creation", "resize")
"""Groups in which the daemon dies before it serves; each daemon of such a round dies."""
_ARM: Final = "tests.crashes.points:arm"

Call = Callable[[Instance, random.Random], None]

_MIXED: Final[tuple[Call, ...]] = (
    Instance.put,
    Instance.put,
    Instance.put,
    Instance.put,
    Instance.reserve,
    Instance.compute,
    Instance.hold,
    Instance.evict,
    Instance.sequence,
)
_OFTEN: Final[dict[str, tuple[Call, ...]]] = {
    "commit": (Instance.put, Instance.reserve, Instance.sequence),
    "lend": (Instance.put, Instance.ask_and_leave),
    "evict": (Instance.evict, Instance.clear),
    "attach": (Instance.attach,),
    "touch": (Instance.touch,),
    "invalidate": (Instance.invalidate,),
    "offload": (Instance.device, Instance.device, Instance.device, Instance.fill_card),
}
_SMALL: Final[tuple[Call, ...]] = (Instance.put, Instance.put, Instance.put, Instance.put, Instance.hold)
_SMALL_GROUPS: Final = ("reclaim", "pages")
LARGE_POINTS: Final = points_of({group: DAEMON[group] for group in DAEMON if group not in _SMALL_GROUPS})
SMALL_POINTS: Final = points_of({group: DAEMON[group] for group in _SMALL_GROUPS})


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
        start(self._instance)
        load(self._instance, "commit", random.Random(0))
        self._instance.daemon.kill()
        return self

    def __exit__(self, *_: object) -> None:
        self._instance.__exit__()

    def play(self, turn: Round) -> tuple[str, ...]:
        """See `play`."""
        return play(self._instance, turn)

    def finish(self) -> None:
        """Checks the memory after the last crash, and checks that all of it can be freed.

        Raises:
            AssertionError: an entry is lost, torn or wrong, or something leaked.
        """
        start(self._instance)
        self._instance.finish()


def play(instance: Instance, turn: Round) -> tuple[str, ...]:
    """Plays one round, which begins and ends without a daemon. The next `start` checks the memory of the last crash.

    Returns:
        The places at which daemons died; empty if the load did not reach the line and a kill from outside ended the
        round.

    Raises:
        AssertionError: an entry is lost, torn or wrong, or something leaked.
    """
    chance = random.Random(turn.seed)
    told = instance.daemon.folder / "places"
    told.unlink(missing_ok=True)
    daemon = instance.daemon
    if turn.group in _OVER_MEMORY:
        _prepare(instance, turn, chance)
    for at in _lines(turn, chance):
        if turn.group == "resize":
            instance.resize(chance)
        daemon.before = _ARM, {"patterns": [turn.pattern], "at": at, "told": str(told)}
        start(instance)
        if turn.group == "removal":
            daemon.interrupt()
            instance.forget()
        elif daemon.running:
            load(instance, turn.group, chance)
        daemon.kill()
    daemon.before = None
    return tuple(told.read_text().split()) if told.exists() else ()


def _lines(turn: Round, chance: random.Random) -> list[int]:
    """The line at which each daemon of the round dies."""
    if turn.group not in _OVER_MEMORY:
        return [turn.at]
    return [turn.at, *(chance.randint(1, turn.at) for _ in range(RECOVERIES - 1))]


def _prepare(instance: Instance, turn: Round, chance: random.Random) -> None:
    """Leaves memory in the middle of a load, without a daemon; for a creation, leaves no memory."""
    start(instance)
    if turn.group == "creation":
        instance.daemon.interrupt()
        instance.forget()
        return
    load(instance, turn.group, chance, settle=False)
    instance.daemon.kill()


def start(instance: Instance) -> None:
    """Starts the next daemon, and compares its entries with the model if it serves."""
    with contextlib.suppress(Ended):
        if instance.daemon.try_start():
            instance.check()


def load(instance: Instance, group: str, chance: random.Random, *, settle: bool = True) -> None:
    """Makes CALLS calls, or fewer if the daemon ends; with `settle`, waits for their answers."""
    calls = _SMALL if instance.small else (*_MIXED, *_OFTEN.get(group, ()) * 4)
    if group == "pages":
        calls = (*_SMALL, *(Instance.limit,) * 2)
    with contextlib.suppress(Ended):
        for _ in range(CALLS):
            chance.choice(calls)(instance, chance)
        if settle:
            instance.settle()
