"""The clock of all times in shared memory: CLOCK_BOOTTIME, in seconds.

Nobody can set it, and it goes on while the machine sleeps; shared memory does not outlive a boot. So a time that one
daemon wrote is right for the next one and for every client, whatever became of the wall clock in between.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since the machine was booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_at_boot_s() -> float:
    """The Unix time of the boot, by the wall clock as it is now."""
    return time.time() - boot_s()
