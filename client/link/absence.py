"""Why there is no daemon: as an error, and as the warning of a process that uses the cache without one.

Owns: the one line in the log of logger `tensord`. Does not own: the attempts to attach (link.py).
Invariants: a process warns at most once of each socket, and of SOCKETS_MAX sockets at most; so do its forks. A client
that was attached before does not warn.
"""

from __future__ import annotations

import logging
from copy import copy
from pathlib import Path
from typing import Final

from ...errors import DaemonUnavailable, TensordError
from ...ipc.wire.descriptors import unreachable

_log = logging.getLogger("tensord")
SOCKETS_MAX: Final = 64
_warned: dict[Path, object] = {}
"""By socket: what its first warning has put here. No lock, which the child of a fork could find taken."""


def absence(error: TensordError | OSError, socket: Path, *, warn: bool) -> TensordError:
    """The reason why there is no daemon at `socket`. With `warn`, logs it if this process has not yet."""
    why = error if isinstance(error, TensordError) else unreachable(error)
    first = object()
    if warn and len(_warned) < SOCKETS_MAX and _warned.setdefault(socket, first) is first:
        _log.warning("tensord: %s. Until a daemon answers, every lookup is a miss and nothing is stored", why)
    return why


def unavailable(error: TensordError | None, path: Path) -> TensordError:
    """Why there is no daemon, as a new error for each caller. A shared error would keep the frames of all its callers,
    with their payloads and views, until the daemon is back.
    """
    return copy(error) if error is not None else DaemonUnavailable(f"not attached to the daemon at {path}")
