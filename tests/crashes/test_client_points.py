"""A client killed at each of its crash points: nothing of it is left, what it was told is stored is there, and others'
views are right.
"""

from __future__ import annotations

import pytest

from .points import CLIENT
from .sessions import session
from .test_daemon_points import die_at, kind_of


@pytest.mark.parametrize("group", list(CLIENT))
def test_of_a_client_killed_at_any_point_only_what_it_stored_is_left(group: str) -> None:
    with session(kind_of(f"{group}/")) as playing:
        for number, pattern in enumerate(CLIENT[group]):
            die_at(playing, f"{group}/{pattern}", seed=number)
        playing.finish()
    assert playing.checked
