"""Reads the small files that settings name.

Owns: the checks before a file is read. Does not own its content. Invariants: reading ends, also if the path is a device
or a pipe that nobody writes to. No descriptor is left open, whatever the path is.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

BYTES_MAX: Final = 1 << 20


def small_text(path: Path) -> str:
    """The text of a regular file of at most BYTES_MAX bytes, or of /dev/null. Raises OSError if the file cannot be
    read, is not a regular file or is too large, and UnicodeDecodeError if it is not UTF-8."""
    with open(path, "rb", opener=_open) as file:  # raises for a folder
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) and status.st_rdev != os.stat(os.devnull).st_rdev:
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {BYTES_MAX} bytes", str(path))
    return content.decode()


def _open(path: str, flags: int) -> int:
    # If the path is a folder, `open` closes what its opener has opened. It would leave a descriptor that it is given.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
