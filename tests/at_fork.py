"""A hook that runs between the library's own check before a fork and the fork.

Hooks before a fork run in reverse order of registration, so this module has to be imported before the library: the
server that children are forked from imports it first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

BEFORE_THE_LIBRARY = "tensord.client.threads.forks" not in sys.modules
last_before_fork: list[Callable[[], None]] = []


def _before() -> None:
    for call in last_before_fork:
        call()


os.register_at_fork(before=_before)
