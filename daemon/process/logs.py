"""The format and the destination of the daemon's log: standard error, one line for each event.

Owns: the configuration of structlog, the choice between key=value and JSON, the level, which takes effect at once,
and which events have just been logged. Does not own the events.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import structlog

from .printable import escaped

LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORGOTTEN_S: Final = 600.0
REPEATS_MAX: Final = 1024
_PRIORITIES: Final = {"info": 6, "warning": 4, "error": 3, "critical": 2}


def setup(
    level_name: str, format_name: str = "auto", environ: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Configures logging for this process to `stream`, standard error unless given. A further call replaces the
    configuration. `level_name`: the lowest level that is logged. `format_name`: "json", "console" (key=value), or
    "auto": JSON if `stream` goes to the journal. A line for the journal begins with its priority, which the journal
    removes."""
    stream = sys.stderr if stream is None else stream
    journal = to_journal(os.environ if environ is None else environ, stream)
    as_json = format_name == "json" or (format_name == "auto" and journal)
    added: list[Any] = [structlog.processors.add_log_level, structlog.processors.format_exc_info]
    if as_json:
        added.append(structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"))
        added.append(structlog.processors.JSONRenderer(default=str))
        added += [_with_priority] * journal
    else:
        order = ["time", "level", "part", "event"]
        added.append(structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%f%z", utc=False, key="time"))
        added.append(structlog.processors.LogfmtRenderer(key_order=order, drop_missing=True, bool_as_flag=False))
    structlog.configure(
        processors=[*added, _printable],
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lossy(stream))),
        cache_logger_on_first_use=False,  # so that a further call also applies to loggers that modules hold
    )
    level(level_name)


class _Lossy:
    """A stream that loses what it cannot write: to a full disk, to a file at RLIMIT_FSIZE, to a reader that is gone. No
    such line may end the daemon."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def level(name: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(LEVELS[name]))


def logger(part: str) -> structlog.BoundLogger:
    """The logger of a part of the daemon. Its lines have the field `part`."""
    return cast(structlog.BoundLogger, structlog.get_logger(part=part))


def to_journal(environ: Mapping[str, str], stream: TextIO) -> bool:
    """True if `stream` goes to the journal: JOURNAL_STREAM names its device and inode. The variable alone is not
    enough: a child process with redirected standard error inherits it too."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Repeats:
    """The recent events: a peer that retries every second gets one line, not one a second. An event that did not happen
    for FORGOTTEN_S is new again. Of more than REPEATS_MAX events the oldest are forgotten first."""

    def __init__(self) -> None:
        self._last: OrderedDict[Hashable, float] = OrderedDict()

    def is_new(self, what: Hashable, now: float) -> bool:
        """Records that the event `what` happens now. Returns True if it did not happen in the last FORGOTTEN_S."""
        last = self._last.pop(what, None)
        self._last[what] = now
        if len(self._last) > REPEATS_MAX:
            self._last.popitem(last=False)
        return last is None or now - last > FORGOTTEN_S


def _printable(_: Any, method: str, line: Any) -> str:
    """Names come from clients: they must not control the terminal of a reader."""
    return escaped(line)


def _with_priority(_: Any, method: str, line: str) -> str:
    # The journal reads a leading <N> as the line's priority and removes it.
    return f"<{_PRIORITIES.get(method, 6)}>{line}"
