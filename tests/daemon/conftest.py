"""Stands are checked when their test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .checked import Checked


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    Checked.made.clear()
    yield
    for stand in Checked.made:
        stand.check()
