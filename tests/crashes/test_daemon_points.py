"""The daemon killed at each of its crash points: no entry is lost, torn or wrong, and nothing leaks.

`make crashes KILLS=10000` is the long form.
"""

from __future__ import annotations

import pytest

from .points import DAEMON, Round
from .sessions import KINDS, AnySession, session

AT = 7
SLOT_LINES = {
    "commit/shm.index:IndexWriter.reserve": range(8, 17),
    "publish/shm.index:IndexWriter.publish": range(1, 6),
    "reclaim/shm.index:IndexWriter.unpublish": range(1, 6),
    "reclaim/shm.index:IndexWriter.release": range(1, 6),
}
"""The lines at which a slot changes word by word: those of the first call, and the first line of the next call."""


@pytest.mark.parametrize("group", list(DAEMON))
def test_a_daemon_killed_at_any_point_loses_nothing_and_shows_nothing_wrong(group: str) -> None:
    with session(kind_of(f"{group}/")) as playing:
        for number, pattern in enumerate(DAEMON[group]):
            die_at(playing, f"{group}/{pattern}", seed=number)
        playing.finish()
    assert playing.checked


@pytest.mark.parametrize("point", list(SLOT_LINES))
def test_a_daemon_killed_between_two_words_of_a_slot_leaves_the_index_sound(point: str) -> None:
    with session(kind_of(point)) as playing:
        for at in SLOT_LINES[point]:
            assert playing.play(Round(point, at, seed=at))
        playing.finish()
    assert playing.checked


def kind_of(beginning: str) -> str:
    return next(kind for kind, points in KINDS.items() if any(point.startswith(beginning) for point in points))


def die_at(playing: AnySession, point: str, seed: int) -> None:
    """Dies at one of the first lines; if the load does not reach it, at the first, also of other loads."""
    for at, drawn in ((AT, seed), (1, seed), (1, seed + 100), (1, seed + 200)):
        if playing.play(Round(point, at, drawn)):
            return
    pytest.fail(f"{point}: no load reaches this point; if the function was renamed, change points.py")
