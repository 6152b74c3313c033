"""Stands that are checked when a test is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .stand import Make, Stand


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stands with clients 1, 2 and 3."""
    made: list[Stand] = []

    def make(*args: Any, **more: Any) -> Stand:
        stand = Stand(*args, **more)
        stand.join(1, 2, 3)
        made.append(stand)
        return stand

    yield make
    for stand in made:
        stand.check()
