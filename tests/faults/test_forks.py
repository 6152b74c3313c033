"""Forks at the worst moments: neither side's views are overwritten, whoever holds the client, the lane or the view.

Each test has the ring overwritten a hundred times, which leaves nothing of an entry that nobody pins.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.client.core import forks
from tensord.shm.lanes import LOG_AT, PINS_AT, Lane

from ..daemon_process import PATIENCE_S, Daemon, until
from ..interruptions import interrupt
from ..processes import Child, Stage
from .payloads import is_payload, key, payload
from .small_ring import PINNED, overwrite, released


def viewed(client: tensord.Client) -> Any:
    """A view of the pinned entry, without its lease."""
    lease = client.get(key(PINNED))
    assert lease is not None
    assert lease.handle() is not None, "a copy shows nothing"
    return lease.tree


def closes_its_client(client: list[tensord.Client]) -> None:
    client[0].close()


def forgets_its_client(client: list[tensord.Client]) -> None:
    client.clear()
    gc.collect()


def attaches_with_another_lane(client: list[tensord.Client]) -> None:
    link = client[0]._link
    lane, before = lane_of(client[0]), link.attachment.channel
    assert lane is not None and before is not None
    link.view = None
    before.close()
    until(lambda: client[0].connected and lane_of(client[0]) not in (None, lane), "the client to attach again")


def lane_of(client: tensord.Client) -> object:
    view = client._link.view
    return view and view.lane


def nothing_more(client: list[tensord.Client]) -> None:
    pass


Then = Callable[[list[tensord.Client]], None]
BEFOREHAND: list[Then] = [closes_its_client, forgets_its_client, attaches_with_another_lane, nothing_more]


def outlives(stage: Stage, socket: Path, beforehand: str, keeper: str) -> None:
    """Forks with a live view; `keeper` keeps it, and the other side lets go of its own."""
    client = [tensord.Client(socket, timeout_s=PATIENCE_S)]
    view = viewed(client[0])
    next(do for do in BEFOREHAND if do.__name__ == beforehand)(client)
    forked = os.fork()
    if not forked:
        if keeper == "child":
            stage.tell("alone")
            stage.hear()
            stage.tell(is_payload(view, PINNED))
        del view
        gc.collect()
        os._exit(0)
    if keeper == "child":
        del view
        gc.collect()
        os.waitpid(forked, 0)
        return
    os.waitpid(forked, 0)
    stage.tell("alone")
    stage.hear()
    stage.tell(is_payload(view, PINNED))


@pytest.mark.parametrize("keeper", ["parent", "child"])
@pytest.mark.parametrize("beforehand", [do.__name__ for do in BEFOREHAND])
def test_a_view_that_both_sides_of_a_fork_hold_stays_right_when_one_of_them_drops_it(
    small: Daemon, beforehand: str, keeper: str
) -> None:
    with Child(outlives, small.socket, beforehand, keeper) as child:
        assert child.hear() == "alone"
        overwrite(small)
        child.tell()
        assert child.hear() is True
        child.wait()
    released(small)


class Between:
    """In the place of logging's lock, which is taken before a fork, after this library has looked at its lanes."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def acquire(self) -> None:
        """In a thread of its own, as another one would come upon it."""
        thread = threading.Thread(target=self._do)
        thread.start()
        thread.join()

    def release(self) -> None:
        pass

    def _at_fork_reinit(self) -> None:
        pass


def leases_before_the_fork(stage: Stage, socket: Path) -> None:
    """Another thread takes a lease while a fork is under way; parent and child hold it, and the parent lets go."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    held: list[Any] = []
    assert client.contains(key(PINNED))
    forked = fork_with(lambda: held.append(client.get(key(PINNED))))
    if not forked:
        stage.tell("alone")
        stage.hear()
        stage.tell(is_payload(held[0].tree, PINNED))
        os._exit(0)
    held.clear()
    gc.collect()
    os.waitpid(forked, 0)


def batches_before_the_fork(stage: Stage, socket: Path) -> None:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    held: list[Any] = []
    forked = fork_with(lambda: held.append(client.get_many([key(PINNED), key(99)])))
    if not forked:
        stage.tell("alone")
        stage.hear()
        stage.tell(is_payload(held[0][0].tree, PINNED))
        os._exit(0)
    held.clear()
    gc.collect()
    os.waitpid(forked, 0)


def attaches_before_the_fork(stage: Stage, socket: Path) -> None:
    held: list[Any] = []

    def attach_and_get() -> None:
        client = tensord.Client(socket, timeout_s=PATIENCE_S)
        assert client.wait_connected(PATIENCE_S)
        held.extend([client, client.get(key(PINNED))])

    forked = fork_with(attach_and_get)
    if not forked:
        stage.tell("alone")
        stage.hear()
        stage.tell(is_payload(held[1].tree, PINNED))
        os._exit(0)
    held.pop()
    gc.collect()
    os.waitpid(forked, 0)


def fork_with(do: Callable[[], None]) -> int:
    """A fork during which `do` runs in another thread, once."""
    before = vars(logging)["_lock"]
    vars(logging)["_lock"] = Between(do)
    forked = os.fork()
    vars(logging)["_lock"] = before
    return forked


@pytest.mark.parametrize("act", [leases_before_the_fork, batches_before_the_fork, attaches_before_the_fork])
def test_a_lease_taken_during_a_fork_is_right_in_parent_and_child(
    small: Daemon, act: Callable[[Stage, Path], None]
) -> None:
    with Child(act, small.socket) as child:
        assert child.hear() == "alone"
        overwrite(small)
        child.tell()
        assert child.hear() is True
        child.wait()
    released(small)


def forks_often(stage: Stage, socket: Path) -> None:
    """Forks without views, from several threads at once; then its lane is as it was, and pins."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    assert client.contains(key(PINNED))
    view = client._link.view
    assert view is not None

    def fork() -> None:
        for _ in range(5):
            forked = os.fork()
            if not forked:
                os._exit(0)
            os.waitpid(forked, 0)

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease = client.get(key(PINNED))
    assert lease is not None
    stage.tell((client._link.view is view, lease.handle() is not None, view.lane.in_use))
    stage.hear()
    stage.tell(is_payload(lease.tree, PINNED))


def test_after_forks_without_views_a_client_goes_on_with_the_lane_it_has(small: Daemon) -> None:
    with Child(forks_often, small.socket) as child:
        assert child.hear() == (True, True, 1)
        overwrite(small)
        child.tell()
        assert child.hear() is True
        child.wait()
    released(small)


def writes_what_it_inherited(stage: Stage, socket: Path) -> None:
    """A child writes to an inherited array, which its parent commits."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    reserved = client.reserve(tensord.Spec((8192,), "uint64"))
    inherited = reserved.tree
    inherited[:] = payload(9)
    forked = os.fork()
    if not forked:
        right = is_payload(inherited, 9)
        inherited[:] = 0xEE
        os._exit(0 if right else 1)
    child = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    put = reserved.commit(key(9), wait=True)
    lease = client.get(key(9), verify=True)
    stage.tell((child, put.state, lease is not None and is_payload(lease.tree, 9)))


def test_a_child_s_writes_to_an_inherited_array_reach_no_other_process(small: Daemon) -> None:
    with Child(writes_what_it_inherited, small.socket) as child:
        assert child.hear() == (0, "stored", True)


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


def commits_what_was_reserved_before_a_fork(stage: Stage, socket: Path) -> tuple[str, str]:
    """How the child's commit ends, and the parent's, whose lane a view froze."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    view = viewed(client)
    reserved = client.reserve(tensord.Spec((8192,), "uint64"))
    reserved.tree[:] = payload(4)
    told, tell = os.pipe()
    if not os.fork():
        reserved.tree[:] = payload(3)
        os.write(tell, reserved.commit(key(3), wait=True).state.encode())
        os._exit(0)
    parent = reserved.commit(key(4), wait=True).state
    os.wait()
    del view
    return os.read(told, 4096).decode(), parent


def test_what_was_reserved_before_a_fork_is_the_own_of_each_side(small: Daemon) -> None:
    with Child(commits_what_was_reserved_before_a_fork, small.socket) as child:
        assert child.hear() == ("stored", "stored")
    reader = small.client()
    for number in (3, 4):
        lease = reader.get(key(number), verify=True)
        assert lease is not None and is_payload(lease.tree, number)


def test_a_child_may_write_to_an_inherited_array_whose_client_is_closed(small: Daemon) -> None:
    with Child(writes_after_the_close, small.socket) as child:
        assert child.hear() == 0


def writes_after_the_close(stage: Stage, socket: Path) -> int:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    array = client.reserve(tensord.Spec((8192,), "uint64")).tree
    array[:] = payload(9)
    client.close()
    forked = os.fork()
    if not forked:
        right = is_payload(array, 9)
        array[:] = 1
        os._exit(0 if right else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    assert is_payload(array, 9)
    return status


def test_a_child_does_not_wait_for_a_client_that_was_closed_before_the_fork(small: Daemon) -> None:
    with Child(uses_a_closed_client, small.socket) as child:
        in_child, in_parent = child.hear()
    assert in_child == in_parent == [None, None, "lost", False], "a call found something without a connection"


def uses_a_closed_client(stage: Stage, socket: Path) -> list[Any]:
    """The results of calls of a closed client, in a child of a fork and in its parent. Each may wait for longer than
    the child is given."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    namespace = tensord.Namespace(model="closed", revision="1", dtype="float32", processor="none")
    cache = tensord.PrefixCache(client, namespace, block_tokens=16)
    client.close()

    def use() -> list[Any]:
        put = client.put(key(1), payload(1), timeout_s=2 * PATIENCE_S)
        match = cache.match(range(32), timeout_s=2 * PATIENCE_S)
        return [client.get(key(PINNED)), match, put.state, client.wait_connected(2 * PATIENCE_S)]

    receiving, sending = Pipe(duplex=False)
    forked = os.fork()
    if not forked:
        sending.send(use())
        os._exit(0)
    try:
        assert receiving.poll(PATIENCE_S), "the child waits for a connection that never comes"
        return [receiving.recv(), use()]
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def forks_just_after_the_lane_is_closed(stage: Stage, socket: Path, beforehand: str) -> list[int]:
    """Forks between the close of a lane's descriptor and the next step, when a new file has the same number already.

    Returns:
        For each such fork, 0 if the child still has the new file.
    """
    client = [tensord.Client(socket, timeout_s=PATIENCE_S)]
    assert client[0].get(key(PINNED)) is not None
    lane_fd, close, statuses = client[0]._link._lane_fd, os.close, []

    def close_and_fork(fd: int) -> None:
        close(fd)
        if fd != lane_fd:
            return
        os.close = close
        opened = os.open(os.devnull, os.O_RDONLY)
        os.dup2(opened, fd)
        forked = os.fork()
        if not forked:
            os._exit(0 if is_open(fd) and os.path.sameopenfile(fd, opened) else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))

    os.close = close_and_fork
    next(do for do in BEFOREHAND if do.__name__ == beforehand)(client)
    # The thread of a client that is collected closes it.
    until(lambda: statuses, "the descriptor to be closed")
    return statuses


@pytest.mark.parametrize("beforehand", [do.__name__ for do in BEFOREHAND[:3]])
def test_a_child_closes_no_file_that_the_program_opened_meanwhile(small: Daemon, beforehand: str) -> None:
    with Child(forks_just_after_the_lane_is_closed, small.socket, beforehand) as child:
        assert child.hear() == [0]


def _fork(pids: list[int]) -> None:
    pids.append(os.fork())


def forks_with_an_exception_in_each_place(stage: Stage, socket: Path) -> tuple[int, list[str]]:
    """Forks with a live view and an exception of a signal handler, at one point of the fork's handlers after another.

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
            inherited = client._link.view is not None or not lane.frozen
            os._exit(1 if inherited or forks._under_way else 0)
        del view
        gc.collect()
        # The child may still have its view, so the word stays.
        pinned = any(memoryview(lane._map).cast("Q")[PINS_AT:LOG_AT])
        status = os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1])
        if not pinned or status or forks._under_way:
            wrong.append(f"{place}: word {pinned}, child {status}, forks under way {len(forks._under_way)}")
        if not place:
            until(lambda: client.connected and lane_of(client) is not None, "the client to attach")
            lease = client.get(key(PINNED))
            return point, wrong if lease is not None and lease.handle() is not None else ["no pinned lease afterwards"]
    raise AssertionError("the handlers have no end")


WHERE_FORKS_ARE_HANDLED = ("core/forks.py", "core/link.py", "shm/lanes.py", "shm/unshared.py")


def test_an_exception_of_a_signal_handler_during_a_fork_leaves_the_views_of_both_sides_pinned(small: Daemon) -> None:
    with Child(forks_with_an_exception_in_each_place, small.socket) as child:
        points, wrong = child.hear()
    assert points > 20
    assert not wrong, "\n".join(wrong)
