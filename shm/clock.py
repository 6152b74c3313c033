"""The clock of all times in shared memory: CLOCK_BOOTTIME, in seconds.

Nobody can set this clock, it continues during suspend, and shared memory does not outlive a boot. So a time written by
one daemon is right for the next daemon and for every client, even if the wall clock was set in between.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since the machine was booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_at_boot_s() -> float:
    """The Unix time of the boot, according to the wall clock's present setting."""
    return time.time() - boot_s()
