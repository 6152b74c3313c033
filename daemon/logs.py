"""How the daemon's log lines look and where they go: standard error, one line each.

Owns: structlog's set-up, the choice between key=value and JSON, the level. Does not own: what is
logged.

What `bound(...)` binds stands in every line of the same task and of the tasks it starts, so that
all lines about one request carry its client and id. `level(...)` takes effect at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Final, TextIO, cast

import structlog

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES: Final = {"exception": "error", "warn": "warning"}
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}

_least = logging.INFO


def setup(
    level_name: str,
    format_name: str = "auto",
    environ: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set logging up for this process; again replaces what was.

    format_name: "json", "console" (key=value), or "auto": JSON where `stream` is the journal's.
    environ, stream: os.environ and standard error unless given.
    """
    stream = sys.stderr if stream is None else stream
    as_json = format_name == "json" or (
        format_name == "auto" and to_journal(os.environ if environ is None else environ, stream)
    )
    level(level_name)
    structlog.configure(
        processors=[
            _drop_below_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            *(_json() if as_json else _console()),
        ],
        logger_factory=structlog.WriteLoggerFactory(stream),
        wrapper_class=structlog.BoundLogger,
        cache_logger_on_first_use=False,  # so that a set-up reaches loggers that modules hold
    )


def level(name: str) -> None:
    """From now on, log `name` and above."""
    global _least
    _least = LEVELS[name]


def logger(part: str) -> structlog.BoundLogger:
    """The logger of a part of the daemon; its lines carry part=..."""
    return cast(structlog.BoundLogger, structlog.get_logger(part=part))


def bound(**values: object) -> AbstractContextManager[None]:
    """Within it, and in tasks begun there, every line carries `values`."""
    return structlog.contextvars.bound_contextvars(**values)


def to_journal(environ: Mapping[str, str], stream: TextIO) -> bool:
    """Whether `stream` is what the journal reads: JOURNAL_STREAM names its device and inode.

    The variable alone says nothing: a child whose standard error was redirected inherits it too.
    """
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _drop_below_level(_: Any, method: str, event: MutableMapping[str, Any]) -> Any:
    if method == "exception":
        event.setdefault("exc_info", True)
    named = _NAMES.get(method, method)
    if LEVELS.get(named, logging.CRITICAL) < _least:
        raise structlog.DropEvent
    event["level"] = named
    return event


def _console() -> list[Any]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False, key="time"),
        structlog.processors.LogfmtRenderer(
            key_order=["time", "level", "part", "event"], drop_missing=True, bool_as_flag=False
        ),
    ]


def _json() -> list[Any]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.JSONRenderer(default=str),
        _with_priority,
    ]


def _with_priority(_: Any, method: str, line: str) -> str:
    # The journal takes a leading <N> as the line's priority and cuts it off.
    return f"<{_PRIORITIES.get(_NAMES.get(method, method), 6)}>{line}"
