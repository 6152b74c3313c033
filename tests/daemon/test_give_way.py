"""Threads that write to a remote store leave the processors to programs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tensord.daemon.process import give_way
from tensord.daemon.process.give_way import GivesWay

from ..daemon_process import until

SPIN = "while True: pass"


class Rests(threading.Event):
    """An event that is waited for in no time, and has the times."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return False


@pytest.fixture
def busy() -> Iterator[int]:
    """A processor on which another program computes all the time, and this thread too."""
    before = os.sched_getaffinity(0)
    processor = min(before)
    os.sched_setaffinity(0, {processor})
    spinner = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield processor
    finally:
        spinner.kill()
        spinner.wait()
        os.sched_setaffinity(0, before)


def work() -> None:
    ends_at = time.thread_time() + 0.01
    while time.thread_time() < ends_at:
        pass


def test_a_thread_that_had_to_wait_for_a_processor_rests_before_it_works_again(busy: int) -> None:
    rests = Rests()
    gives_way = GivesWay(rests)

    def rested() -> bool:
        with gives_way.working(hurried=False):
            work()
        return bool(rests.seconds)

    until(rested, "the thread rests")
    assert 0 < rests.seconds[0] <= give_way.REST_S_MOST


def test_hurried_work_does_not_rest(busy: int) -> None:
    rests = Rests()
    gives_way = GivesWay(rests)

    def rested() -> bool:
        for _ in range(5):
            with gives_way.working(hurried=True):
                work()
        assert not rests.seconds
        with gives_way.working(hurried=False):
            return bool(rests.seconds)

    until(rested, "what was worked in a hurry counts afterwards")
