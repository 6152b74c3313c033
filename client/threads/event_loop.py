"""Runs a call of the synchronous client in a thread of the event loop's.

Owns: what becomes of the call when its task is cancelled, and when no thread can be started. Does not own the threads:
the loop's default executor has them.

Invariant: a call that its task was told the end of never runs later, and `to_its_end` does not return before its call.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from .aside import no_thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def in_thread(call: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """As `asyncio.to_thread`. A cancelled task leaves a call that has begun to itself.

    Raises:
        ProcessLimit: this process can start no thread; the call is not carried out.
    """
    return await asyncio.wrap_future(begun(partial(call, *args, **named)))


async def to_its_end(call: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """As `in_thread`, for a call that reads or writes the caller's memory: a cancelled task waits until a call that has
    begun is over. So the memory is the task's again, however the call ends.

    Raises:
        ProcessLimit: as for `in_thread`.
    """
    under_way = begun(partial(call, *args, **named))
    ended = asyncio.wrap_future(under_way)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        under_way.cancel()
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                continue
        if not ended.cancelled():
            ended.exception()  # asked for, so that asyncio does not complain that nobody did
        raise
    finally:
        # An error has this frame in its traceback, and these have the error.
        del under_way, ended


def _carry_out(holder: list[Future[Result]], call: Callable[[], Result]) -> None:
    """Takes the future out of `holder`: an error has this frame and that of the executor, which has the arguments, in
    its traceback, and must not find itself from there."""
    outcome = holder.pop()
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    finally:
        del outcome


def begun(call: Callable[[], Result]) -> Future[Result]:
    """The future of a call that a thread of the loop's executor carries out.

    Raises:
        ProcessLimit: as for `in_thread`.
    """
    outcome: Future[Result] = Future()
    context = contextvars.copy_context()

    try:
        asyncio.get_running_loop().run_in_executor(None, _carry_out, [outcome], partial(context.run, call))
    except RuntimeError as error:
        # The call is queued although no thread could be started for it. Another thread may have taken it already.
        if outcome.cancel():
            if "thread" in str(error):
                raise no_thread() from None
            raise
    return outcome
