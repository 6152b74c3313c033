"""Signal handlers at a chosen instruction of the thread that makes a call. They raise an exception, or do something.

Owns: the count of those instructions at which the interpreter looks for signals, in all code that the thread runs.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final

STAND_INS: Final = ("fake_card.py", "fake_stream.py", "fake_vram.py")


class Signal(BaseException):
    """What a signal handler raises."""


@cache
def looks_for_signals(code: CodeType) -> set[int]:
    """Offsets of the instructions before which the interpreter may have run a signal handler.

    The interpreter raises a handler's exception at the instruction that looks for signals, the one before. Where that
    one has another handler of exceptions, as at the end of a `with`, an exception here would be one that never comes.
    """
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((each.target for each in handlers if each.start <= offset < each.end), None)

    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if before is not None and handler(before) == handler(instruction.offset):
            found.add(instruction.offset)
        looks = instruction.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
        before = instruction.offset if looks else None
    return found


def cut() -> None:
    raise Signal


class Interrupted:
    """Calls `handler` at the `number`-th such instruction in files whose names end with one of `files`.

    Of an instruction's runs the first `times` count: those of a loop are much alike.
    """

    def __init__(self, number: int, files: tuple[str, ...], times: int, handler: Callable[[], object]) -> None:
        self._handler = handler
        self.left = number
        self.place = ""
        self._files = files
        self._times = times
        self._runs: Counter[tuple[CodeType, int]] = Counter()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self._files) or code.co_filename.endswith(STAND_INS):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in looks_for_signals(code):
            self._runs[code, frame.f_lasti] += 1
            if self._runs[code, frame.f_lasti] > self._times:
                return self.trace
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.place = f"{code.co_qualname}, line {frame.f_lineno} of {code.co_filename}"
                self._handler()
                return None
        return self.trace


def interrupt(
    number: int,
    act: Callable[[], object],
    files: tuple[str, ...] = (".py",),
    *,
    times: int = 2,
    handler: Callable[[], object] = cut,
) -> str:
    """`act()` with a signal at its `number`-th point, an instruction's first `times` runs counted: where that was,
    empty if it has fewer. The handler raises, or is `handler`."""
    interrupted = Interrupted(number, files, times, handler)
    before, told = sys.gettrace(), sys.unraisablehook
    # Python 3.12 looks at this when the tracing begins, and not again.
    sys._getframe().f_trace_opcodes = True
    # pytest keeps an exception that a finalizer could not raise, and with its frames what they hold.
    sys.unraisablehook = lambda _: None
    sys.settrace(interrupted.trace)
    try:
        act()
    except Signal:
        pass
    finally:
        sys.settrace(before)
        sys.unraisablehook = told
    return interrupted.place
