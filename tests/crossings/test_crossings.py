"""Every state with a fifth of the disturbances, which `make crossings` crosses with all. cell.py has the checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..client.device.card import card_folder
from .cell import Cells
from .disturbances import BY_NAME as DISTURBANCES
from .states import BY_NAME as STATES
from .states import CELLS, name_of

STEP = 5
PROMISED = {
    ("lease", "client closed"),
    ("lease", "SIGTERM and restart"),
    ("lease", "SIGKILL and restart"),
    ("lease", "fork, child uses its copies"),
    ("lease", "lease taken between a fork's hooks"),
    ("batch", "client closed"),
    ("borrowed handle", "SIGKILL and restart"),
    ("copied-out lease of a full lane", "the same keys put by another"),
    ("put under way", "socket cut"),
    ("put of a large payload under way", "socket cut"),
    ("payload in an inbox, not copied yet", "socket cut"),
    ("payload in an inbox, not copied yet", "socket cut twice while the daemon is busy"),
    ("reserve committed, written to after its end", "daemon busy"),
    ("copy into a grant goes on late", "daemon busy"),
    ("copy into a grant goes on late", "SIGTERM and restart"),
    ("chain put under way", "resumed, SIGKILL and restart"),
    ("device entry", "SIGKILL and restart"),
    ("offload under way", "SIGKILL and restart"),
    ("lease", "invalidate, SIGKILL and restart"),
    ("put under way", "invalidate"),
}
"""The cells that rows of docs/reliability.md are about."""
SOME = [cell for number, cell in enumerate(CELLS) if not number % STEP or cell in PROMISED]


def test_the_part_that_runs_has_every_state_and_every_disturbance() -> None:
    assert {state for state, _ in SOME} == set(STATES) and {each for _, each in SOME} == set(DISTURBANCES)
    assert set(SOME) >= PROMISED


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    with card_folder() as cards:
        running = Cells(cards)
        yield running
        running.end()


@pytest.mark.parametrize(("state", "disturbance"), SOME, ids=[name_of(*cell) for cell in SOME])
def test_crossing(cells: Cells, state: str, disturbance: str) -> None:
    cells.run(state, disturbance)
