"""Every state crossed with every disturbance. cell.py has the checks of a cell, table.py the pairs without a cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..client.device.card import card_folder
from .cell import Cells
from .table import CELLS, name_of


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    with card_folder() as cards:
        running = Cells(cards)
        yield running
        running.end()


@pytest.mark.parametrize(("state", "disturbance"), CELLS, ids=[name_of(*cell) for cell in CELLS])
def test_crossing(cells: Cells, state: str, disturbance: str) -> None:
    cells.run(state, disturbance)
