"""Stands that are checked when a test is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .stand import REMOTE, Make, RemoteStand


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stands with clients 1, 2 and 3."""
    made: list[RemoteStand] = []

    def make(*args: Any, **more: Any) -> RemoteStand:
        made.append(RemoteStand(*args, **more))
        return made[-1]

    yield make
    for stand in made:
        stand.check()


@pytest.fixture
def stand(make: Make) -> RemoteStand:
    """A host whose remote store has answered it already, and for which it waits for 2 s at most."""
    return make(**REMOTE)
