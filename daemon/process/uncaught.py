"""What Python itself would write to standard error goes to the daemon's log, each a line of its format.

Owns: the hooks of the process for warnings, for lines of `logging` (of libraries, and of asyncio), and for exceptions
that nothing catches: in a thread, in a finalizer, in the main thread. Does not own: the log's format (logs.py), nor
what libraries in C write to standard error.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from types import TracebackType
from typing import TextIO

from . import logs


def log_it() -> None:
    """Sets the hooks, for as long as the process lives."""
    warnings.showwarning = _warned
    logging.root.addHandler(_Forwarded(logging.WARNING))
    threading.excepthook = _thread_failed
    sys.unraisablehook = _not_raised
    sys.excepthook = _failed


class _Forwarded(logging.Handler):
    """Lines of `logging`. `part` is the name of their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # the library's words do not fit its values
            text = str(record.msg)
        log = logs.logger(record.name)
        tell = log.error if record.levelno >= logging.ERROR else log.warning
        tell(text, **({"exc_info": record.exc_info} if record.exc_info else {}))


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logs.logger("python").warning(str(message), warning=category.__name__, where=f"{filename}:{lineno}")


def _thread_failed(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:
        return
    name = ended.thread.name if ended.thread is not None else None
    error = (ended.exc_type, ended.exc_value, ended.exc_traceback)
    logs.logger("python").error("a thread ended with an error of its own: report it", thread=name, exc_info=error)


def _not_raised(lost: sys.UnraisableHookArgs) -> None:
    error = (lost.exc_type, lost.exc_value, lost.exc_traceback)
    where = repr(lost.object)
    logs.logger("python").error("an error that could not be raised: report it", where=where, exc_info=error)


def _failed(of: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logs.logger("python").error("the daemon ended", exc_info=(of, error, traceback))
