"""The daemon and clients killed at each of their crash points: no entry is lost, torn or wrong, and nothing leaks.

`make crashes KILLS=10000` is the long form.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from tensord.daemon.store.commit import Commits

from .daemon_rounds import KINDS, AnySession, session
from .points import CLIENT, DAEMON, Round

AT = 7
TAKE = "commit/daemon.store.commit:Commits.take"
SLOT_LINES = {
    TAKE: range(64, 76),
    "lend/daemon.store.slots:Slots.take_all": range(6, 18),
    "reclaim/daemon.store.slots:Slots.unpublish_all": range(1, 8),
    "reclaim/daemon.store.slots:Slots.release_all": range(1, 6),
}
"""The lines at which a slot changes word by word: those of the first call, and the first line of the next call."""
SLOT_WORDS = ("pack_body(memory", "words[at + 5] =", "words[at] =", "words[line + cell] =")
"""What stands at these lines of TAKE."""


@pytest.mark.parametrize("group", list(DAEMON))
def test_a_daemon_killed_at_any_point_loses_nothing_and_shows_nothing_wrong(group: str) -> None:
    die_at_each(group, DAEMON[group])


@pytest.mark.parametrize("group", list(CLIENT))
def test_a_client_killed_at_any_point_leaves_only_its_stored_entries(group: str) -> None:
    die_at_each(group, CLIENT[group])


def die_at_each(group: str, patterns: Sequence[str]) -> None:
    with session(kind_of(f"{group}/")) as playing:
        for number, pattern in enumerate(patterns):
            die_at(playing, f"{group}/{pattern}", seed=number)
        playing.finish()
    assert playing.checked


@pytest.mark.parametrize("point", list(SLOT_LINES))
def test_a_daemon_killed_between_two_words_of_a_slot_leaves_the_index_sound(point: str) -> None:
    with session(kind_of(point)) as playing:
        # One load may take another way in its first call.
        loads = (0, 100) if point == TAKE else (0,)
        rounds = [Round(point, at, load) for at in SLOT_LINES[point] for load in loads]
        places = {place for each in rounds for place in playing.play(each)}
        assert len(places) > len(SLOT_LINES[point]) // 2, "a line is not reached: change SLOT_LINES"
        playing.finish()
    if point == TAKE:
        lines, _ = inspect.getsourcelines(Commits.take)
        seen = {lines[int(place.rpartition("+")[2])].strip() for place in places}
        assert all(any(line.startswith(word) for line in seen) for word in SLOT_WORDS), f"change SLOT_LINES: {seen}"
    assert playing.checked


def kind_of(beginning: str) -> str:
    return next(kind for kind, points in KINDS.items() if any(point.startswith(beginning) for point in points))


def die_at(playing: AnySession, point: str, seed: int) -> None:
    """Dies at one of the first lines; if the load does not reach it, at the first, also of other loads."""
    for at, drawn in ((AT, seed), (1, seed), (1, seed + 100), (1, seed + 200)):
        if playing.play(Round(point, at, drawn)):
            return
    pytest.fail(f"{point}: no load reaches this point; if the function was renamed, change points.py")
