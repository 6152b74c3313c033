"""A client killed at each of its crash points leaves nothing behind but its stored entries, and no view changes."""

from __future__ import annotations

import pytest

from .points import CLIENT
from .sessions import session
from .test_daemon_points import die_at, kind_of


@pytest.mark.parametrize("group", list(CLIENT))
def test_a_client_killed_at_any_point_leaves_only_its_stored_entries(group: str) -> None:
    with session(kind_of(f"{group}/")) as playing:
        for number, pattern in enumerate(CLIENT[group]):
            die_at(playing, f"{group}/{pattern}", seed=number)
        playing.finish()
    assert playing.checked
