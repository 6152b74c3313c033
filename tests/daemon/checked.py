"""Stands whose invariants are checked when a test is over, whatever the test looks at."""

from __future__ import annotations

from typing import ClassVar


class Checked:
    """What a test plays with, and `check` looks at once the test is over (conftest.py)."""

    made: ClassVar[list[Checked]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def check(self) -> None:
        raise NotImplementedError
