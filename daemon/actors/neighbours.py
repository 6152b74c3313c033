"""Asks neighbours in threads of their own, since their servers may hang.

Owns: a thread for each question, and the time after which a question counts as answered. Does not own what is asked
(`daemon.neighbours`), nor whom to ask when (the governor's core).

They are daemon threads: a server that never answers does not keep the process from ending.

Invariants: every question is answered once, on the event loop, GRACE_S after its time at the latest. A neighbour whose
last thread has not ended is not asked again, so there is at most one thread for each neighbour.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..governor.forms.events import AskNeighbour, NeighbourAnswered
from ..neighbours.registry import ask

GRACE_S: Final = 1.0


class NeighbourAsker:
    """Carries AskNeighbour out.

    Args:
        answered: gets the answers. Called on the event loop.
    """

    def __init__(self, answered: Callable[[NeighbourAnswered], object]) -> None:
        self._answered = answered
        self._threads: dict[str, threading.Thread] = {}
        self._open: dict[int, asyncio.TimerHandle] = {}

    def ask(self, asked: AskNeighbour) -> None:
        """Begins to ask a neighbour. Never blocks."""
        loop, number = asyncio.get_running_loop(), asked.number
        self._threads = {name: thread for name, thread in self._threads.items() if thread.is_alive()}
        late = NeighbourAnswered(number, "failed", f"no answer within {asked.answer_s:g} s")
        self._open[number] = loop.call_later(asked.answer_s + GRACE_S, self._close, late)
        if asked.place.name in self._threads:
            hangs = NeighbourAnswered(number, "failed", "it has not answered the last request, and is not asked again")
            loop.call_soon(self._close, hangs)
            return

        def run() -> None:
            answer = NeighbourAnswered(number, *ask(asked.place, asked.answer_s))
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._close, answer)

        thread = threading.Thread(target=run, name=f"tensord-neighbour-{asked.place.kind}", daemon=True)
        thread.start()
        self._threads[asked.place.name] = thread

    def _close(self, answer: NeighbourAnswered) -> None:
        """Passes an answer on, if it is the first of its question."""
        timer = self._open.pop(answer.number, None)
        if timer is not None:
            timer.cancel()
            self._answered(answer)
