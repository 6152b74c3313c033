"""A daemon whose copier stands still in the middle of its first copies, until a file is there: `Daemon.before`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensord.daemon import copier
from tensord.shm.copy import copy_checked

HOLD = "tests.faults.held_copier:hold"


def hold(half_way: str, go_on: str) -> None:
    """Makes `half_way` when half of a part is copied, and copies the rest when there is `go_on`."""

    def copy(to: Any, source: Any, checksum: Any) -> None:
        half = len(source) // 2
        copy_checked(to[:half], source[:half], checksum)
        Path(half_way).touch()
        while not Path(go_on).exists():
            time.sleep(0.001)
        copy_checked(to[half:], source[half:], checksum)

    vars(copier)["copy_checked"] = copy
