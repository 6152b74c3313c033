"""Rounds in which the daemon dies at one of its crash points, is started again, and is compared to the model.

Owns: which load reaches which points, and how one round goes. A round is drawn from a seed of its own.
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
"""Times in a row that a daemon dies while it recovers."""
_OVER_MEMORY: Final = ("recovery", "creation", "resize")
"""Groups in which the daemon dies before it serves: each daemon of a round dies."""
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
    "commit": (Instance.put, Instance.reserve),
    "place": (Instance.put, Instance.place_and_leave),
    "publish": (Instance.put, Instance.sequence),
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
    """One instance that goes through any number of rounds. Use it in a `with`."""

    def __init__(self, *, small: bool) -> None:
        self._instance = Instance(small=small)

    @property
    def checked(self) -> int:
        """Entries that were compared to the model."""
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
        """Compares what the last crash left, and sees to it that all of it can be freed.

        Raises:
            AssertionError: something is lost, torn, wrong or leaked.
        """
        start(self._instance)
        self._instance.finish()


def play(instance: Instance, turn: Round) -> tuple[str, ...]:
    """One round, which begins and ends without a daemon. `start` after it compares what the last crash left.

    Returns:
        The places at which it died; none where the load did not come so far, and it was killed from outside.

    Raises:
        AssertionError: something is lost, torn, wrong or leaked.
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
    """At which line each of the daemons dies, one after the other."""
    if turn.group not in _OVER_MEMORY:
        return [turn.at]
    return [turn.at, *(chance.randint(1, turn.at) for _ in range(RECOVERIES - 1))]


def _prepare(instance: Instance, turn: Round, chance: random.Random) -> None:
    """Has no daemon run, over memory that was left in the middle of a load; before a creation, without any memory."""
    start(instance)
    if turn.group == "creation":
        instance.daemon.interrupt()
        instance.forget()
        return
    load(instance, turn.group, chance, settle=False)
    instance.daemon.kill()


def start(instance: Instance) -> None:
    """Starts the next daemon and compares what it has to the model, as far as it comes."""
    with contextlib.suppress(Ended):
        if instance.daemon.try_start():
            instance.check()


def load(instance: Instance, group: str, chance: random.Random, *, settle: bool = True) -> None:
    """CALLS calls, or fewer where the daemon ends; `settle`: and their answers."""
    calls = _SMALL if instance.small else (*_MIXED, *_OFTEN.get(group, ()) * 4)
    if group == "pages":
        calls = (*_SMALL, *(Instance.limit,) * 2)
    with contextlib.suppress(Ended):
        for _ in range(CALLS):
            chance.choice(calls)(instance, chance)
        if settle:
            instance.settle()
