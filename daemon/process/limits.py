"""The error of a daemon that ends, or cannot start, because of a limit of its process.

Does not own what a running daemon without free descriptors does (`listener`, `attachments`).
"""

from __future__ import annotations

import errno
import resource
from typing import Final

from ...errors import ProcessLimit
from ...ipc.wire.descriptors import lacks_descriptor, no_descriptor

NO_MEMORY_OR_THREAD: Final = OSError, MemoryError, RuntimeError
"""What work that the daemon can do without, in a thread, may raise under a limit. RuntimeError: no thread."""
_NO_THREAD: Final = "can't start new thread"  # what the interpreter says


def limit_behind(error: BaseException) -> ProcessLimit | None:
    """The error to report for one that a limit of the process has caused; None if it has another cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if lacks_descriptor(error):
        return no_descriptor()
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if no_memory or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD):
        addresses, threads = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
        return ProcessLimit(
            f"no memory or no thread is left for the daemon ({str(error) or type(error).__name__}): RLIMIT_AS is "
            f"{_shown(addresses)}, RLIMIT_NPROC is {_shown(threads)}; raise them (`ulimit -v`, `ulimit -u`), or "
            "MemoryMax and TasksMax of a service"
        )
    return None


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
