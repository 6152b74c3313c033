"""What is handed to the thread that no signal handler runs in, and the locks that a handler's exception leaves free."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tensord.client.threads import forks as _registers_the_handlers_of_forks  # noqa: F401
from tensord.client.threads.aside import aside
from tensord.client.threads.waiting import Condition, LockEvent, LockFuture

from ...daemon_process import PATIENCE_S, until
from ...interruptions import Signal, interrupt

POINTS_MAX = 1000


def test_work_whose_call_is_cut_short_is_done_to_its_end() -> None:
    is_cut, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def cut(*_: object) -> None:
        if not is_cut.is_set():
            is_cut.set()
            raise Signal

    def rung() -> bool:
        # Again, since a signal that comes just before the main thread waits is handled after that wait.
        if not is_cut.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return is_cut.is_set()

    def work() -> None:
        until(rung, "the handler to be called")
        go_on.wait(PATIENCE_S)
        ended.set()

    before = signal.signal(signal.SIGALRM, cut)
    try:
        with pytest.raises(Signal):
            aside(work)
        assert not ended.is_set()
        assert aside(lambda: 7) == 7, "another call does not wait for it"
        go_on.set()
        assert ended.wait(PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["condition", "event", "answer"])
def test_a_wait_that_is_cut_at_any_instruction_leaves_nothing_locked(kind: str) -> None:
    condition, event, answer = Condition(), LockEvent(), LockFuture()

    def wait() -> None:
        with condition:
            condition.wait(0.001)

    def notify() -> None:
        with condition:
            condition.notify_all()

    def result() -> None:
        with suppress(TimeoutError):
            answer.result(0.001)

    act, other = {
        "condition": (wait, notify),
        "event": (lambda: event.wait(0.001), event.set),
        "answer": (result, lambda: answer.set_result(1)),
    }[kind]
    for number in range(POINTS_MAX):
        if not interrupt(number, act):
            break
        if kind == "condition":
            _from_another_thread(other)
    _from_another_thread(other)


def _from_another_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "a lock is taken for ever"
