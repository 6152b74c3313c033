"""What the crossings do not have of a fork: calls right after it, and exceptions of signal handlers within it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensord
from tensord.client.threads import forks
from tensord.shm.lanes.lane import LOG_AT, PINS_AT, Lane

from ..daemon_process import PATIENCE_S, Daemon, some, until
from ..interruptions import interrupt
from ..processes import Child, Stage
from .payloads import PINNED, key, payload


def viewed(client: tensord.Client) -> Any:
    """A view of the pinned entry, without its lease."""
    lease = some(client.get(key(PINNED)))
    assert lease.handle() is not None, "a copy shows nothing"
    return lease.tree


def lane_of(client: tensord.Client) -> object:
    view = client.link.view
    return view and view.lane


def calls_right_after_forks(stage: Stage, socket: Path) -> list[str]:
    """Calls right after forks under a view, which cost the parent its lane: those that did not work."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    calls: dict[str, Callable[[], bool]] = {
        "touch": lambda: client.touch(key(PINNED)) == 1,
        "evict": lambda: client.evict(key(4)) == 0,
        "pin": lambda: client.pin(key(PINNED), 1.0) > 0,
        "reserve": lambda: client.reserve(tensord.Spec((8,), "uint64")).tree.shape == (8,),
        "modes": lambda: "host" in client.modes(),
        "status": lambda: bool(client.status()),
        "clear": lambda: client.clear(tensord.Namespace(model="m", revision="r", dtype="f", processor="p")) == 0,
        "compute": lambda: client.get_or_compute(key(5), lambda: payload(5)) is not None,
        "wait_connected": lambda: client.wait_connected(PATIENCE_S) and client.connected,
    }
    failed = []
    for name, call in calls.items():
        for _ in range(3):
            assert client.wait_connected(PATIENCE_S)
            view = viewed(client)
            forked = os.fork()
            if not forked:
                os._exit(0)
            try:
                right = call()
            except tensord.TensordError as error:
                right, name = False, f"{name}: {error}"
            if not right:
                failed.append(name)
            os.waitpid(forked, 0)
            del view
    return failed


def test_calls_right_after_a_fork_under_a_view_find_the_daemon(small: Daemon) -> None:
    small.until(lambda status: status["governor"]["gauges"], "the first sample")
    with Child(calls_right_after_forks, small.socket) as child:
        assert child.hear() == []


def _fork(pids: list[int]) -> None:
    pids.append(os.fork())


def forks_with_an_exception_in_each_place(stage: Stage, socket: Path) -> tuple[int, list[str]]:
    """Forks with a live view and an exception of a signal handler, at one point of the fork's handlers after another.
    Tells of each that it was there: all of them take half a minute of a busy machine.

    Returns:
        The number of points, and those after which something was wrong.
    """
    client, wrong = tensord.Client(socket, timeout_s=PATIENCE_S), []
    sys.unraisablehook = lambda _: None
    for point in range(1_000_000):
        until(lambda: client.connected and lane_of(client) is not None, "the client to attach")
        view, lane = viewed(client), lane_of(client)
        assert isinstance(lane, Lane)
        forked: list[int] = []
        fork = partial(_fork, forked)
        place = interrupt(point, fork, WHERE_FORKS_ARE_HANDLED, times=1)
        if not forked or not forked[0]:
            inherited = client.link.view is not None or not lane.frozen
            os._exit(1 if inherited or forks._under_way else 0)
        del view
        gc.collect()
        # The child may still have its view, so the word stays.
        pinned = any(memoryview(lane._map).cast("Q")[PINS_AT:LOG_AT])
        status = os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1])
        if not pinned or status or forks._under_way:
            wrong.append(f"{place}: word {pinned}, child {status}, forks under way {len(forks._under_way)}")
        stage.tell("a point")
        if not place:
            until(lambda: client.connected and lane_of(client) is not None, "the client to attach")
            lease = client.get(key(PINNED))
            return point, wrong if lease is not None and lease.handle() is not None else ["no pinned lease afterwards"]
    raise AssertionError("the handlers have no end")


WHERE_FORKS_ARE_HANDLED = ("threads/forks.py", "link/link.py", "shm/lanes/lane.py", "shm/ring/unshared.py")


def test_an_exception_of_a_signal_handler_during_a_fork_leaves_the_views_of_both_sides_pinned(small: Daemon) -> None:
    with Child(forks_with_an_exception_in_each_place, small.socket) as child:
        while (told := child.hear()) == "a point":
            pass
    points, wrong = told
    assert points > 20
    assert not wrong, "\n".join(wrong)
