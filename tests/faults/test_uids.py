"""Limits of uids and processes: who takes all that it may leaves the others theirs, who may not write the ring has no
mapping to do it, and a client that can open no more files, or start no more threads, goes on as without a daemon.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import DaemonUnavailable, LimitReached, ProcessLimit
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import has, is_payload, key, payload
from .raw import RawClient

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes under other uids")
LOUD, QUIET = 54_321, 54_322
OWN_GROUP, DAEMONS_GROUP = LOUD, os.getegid()
TRIES = 64
LARGE_BYTES = 2 * MIB
TOTALS = {"tensord.daemon.config.limits.CLAIMS_MAX": 20, "tensord.daemon.config.limits.STATUS_CLIENTS_MAX": 8}


@contextmanager
def serving(constants: Mapping[str, float] | None = None, /, **flags: object) -> Iterator[Daemon]:
    """A daemon that every uid may connect to."""
    with Daemon(constants, socket_mode="0666", status_mode="0666", **flags) as daemon:
        daemon.folder.chmod(0o711)
        yield daemon.start()


def become(uid: int, gid: int | None = None) -> None:
    """This process is another uid's from now on, in the group `gid` alone; in one of its own if that is None."""
    os.setgroups([])
    os.setgid(uid if gid is None else gid)
    os.setuid(uid)


Takes = Callable[[ExitStack, Path], Iterator[None]]
"""Takes one more of something at each step, until it is refused."""


def takes_clients(stack: ExitStack, path: Path) -> Iterator[None]:
    while True:
        stack.enter_context(RawClient(path, attach=False))
        yield


def takes_lanes(stack: ExitStack, path: Path) -> Iterator[None]:
    """Keeps the lanes although it closes the connections."""
    while True:
        with RawClient(path) as client:
            for fd in client.fds:
                stack.callback(os.close, os.dup(fd))
        yield


def takes_claims(stack: ExitStack, path: Path) -> Iterator[None]:
    clients = [stack.enter_context(RawClient(path)) for _ in range(2)]
    for number in count():
        clients[number % 2].ask(lambda n, number=number: messages.RequestClaim(n, key(number)))
        yield


def takes_readers(stack: ExitStack, path: Path) -> Iterator[None]:
    while True:
        channel = BlockingChannel.connect(path.with_name("status.sock"), PATIENCE_S, Connection.status_client())
        stack.callback(channel.close)
        with suppress(DaemonUnavailable):
            channel.send(messages.HealthQuery(1), timeout_s=PATIENCE_S)
        answer, _ = channel.receive(PATIENCE_S)
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        yield


def hog(stage: Stage, uid: int, path: Path, takes: Takes) -> None:
    """Takes what it may, tells how often that went well and how it was refused, and keeps it until it hears."""
    become(uid)
    with ExitStack() as stack:
        number = -1
        try:
            for number, _ in enumerate(takes(stack, path)):
                assert number < TRIES, "it is never refused"
        except LimitReached as refused:
            stage.tell((number + 1, str(refused)))
        stage.hear()


def one_of_all(stage: Stage, uid: int, path: Path) -> str:
    """A client of the library as any other uid runs it: put, get, compute once, status."""
    become(uid)
    with tensord.Client(path, timeout_s=PATIENCE_S) as client:
        assert client.wait_connected(PATIENCE_S)
        put = client.put(key(900), payload(900, 4096), wait=True)
        lease = client.get(key(900))
        computed = client.get_or_compute(key(901), lambda: payload(901, 512))
        assert lease is not None and is_payload(lease.tree, 900) and is_payload(computed, 901)
        return put.state


@of_root
@pytest.mark.parametrize(
    ("takes", "flags", "most", "named"),
    [
        (takes_clients, {"limits_clients_max": 8}, 6, "quotas.limits_share_max = 0.75) of limits.clients_max = 8"),
        (takes_lanes, {"limits_lanes_max": 8}, 6, "quotas.limits_share_max = 0.75) of limits.lanes_max = 8"),
        (takes_claims, {}, 15, "quotas.limits_share_max = 0.75) of the fixed total = 20"),
        (takes_readers, {}, 6, "quotas.limits_share_max = 0.75) of the fixed total = 8"),
    ],
)
def test_a_uid_that_takes_all_it_may_leaves_other_uids_theirs(
    takes: Takes, flags: dict[str, object], most: int, named: str
) -> None:
    with serving(TOTALS, **flags) as daemon, Child(hog, LOUD, daemon.socket, takes) as loud:
        taken, refusal = loud.hear()
        assert taken == most
        assert f"uid {LOUD} has" in refusal and named in refusal
        with Child(one_of_all, QUIET, daemon.socket) as quiet:
            assert quiet.hear() == "stored"
        assert sum(daemon.status()["quotas"]["refusals"].values()) == 1
        if takes is takes_lanes:
            # The daemon sees the end of a connection a moment later.
            daemon.until(lambda status: counted(status, LOUD) == (most, 0), "its lanes to be left without a client")
        # What it lets go of it may take again.
        loud.tell()
        loud.wait()

        def takes_as_much_again() -> bool:
            with Child(hog, LOUD, daemon.socket, takes) as again:
                return bool(again.hear()[0] == most)

        until(takes_as_much_again, "all of it to be gone")


def counted(status: dict[str, Any], uid: int) -> tuple[int, int]:
    """The lanes and the clients of a uid."""
    (row,) = (row for row in status["quotas"]["uids"] if row["uid"] == uid)
    return row["lanes"], row["clients"]


def puts_large(stage: Stage, uid: int, gid: int, path: Path, how_many: int) -> None:
    """Puts large payloads, and tells how they ended and how it has mapped the ring. Stays connected until it is told
    to end."""
    become(uid, gid)
    with tensord.Client(path, timeout_s=PATIENCE_S) as client:
        assert client.wait_connected(PATIENCE_S)
        states = [client.put(key(n), payload(n, LARGE_BYTES), wait=True).state for n in range(how_many)]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        stage.tell((states, {words[1] for words in maps if words[-1].endswith(".ring")}))
        stage.hear()


def stored_by_another_uid(write_in_place: str, gid: int) -> tuple[set[str], int]:
    """How a client of another uid, in the group `gid`, has mapped the ring once its large payloads are stored and read
    as they were put, and how many inboxes there are."""
    with (
        serving(ring_bytes=64 * MIB, write_in_place=write_in_place) as daemon,
        Child(puts_large, LOUD, gid, daemon.socket, 3) as child,
    ):
        states, mapped = child.hear()
        assert states == ["stored"] * 3
        reader = daemon.client()
        for number in range(3):
            lease = reader.get(key(number), verify=True)
            assert lease is not None and lease.tree.nbytes == LARGE_BYTES and is_payload(lease.tree, number)
        return mapped, daemon.status()["inboxes"]


@of_root
@pytest.mark.parametrize(
    ("write_in_place", "gid"),
    [("owner", OWN_GROUP), ("owner", DAEMONS_GROUP), ("group", OWN_GROUP)],
    ids=["owner", "owner, in the daemon's group", "group, in another group"],
)
def test_large_payloads_of_a_uid_that_may_not_write_the_ring_are_stored_through_its_inbox(
    write_in_place: str, gid: int
) -> None:
    assert stored_by_another_uid(write_in_place, gid) == ({"r--s"}, 1)


FILES = 128
NAMESPACE = tensord.Namespace(model="few", revision="1", dtype="uint64", processor="none")


def takes_all_but(free: int) -> list[int]:
    """Opens files until only `free` descriptors are left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    held: list[int] = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
    return held


def has_few_files(stage: Stage, path: Path, free: int) -> Any:
    client_of, cache_of = tensord.Client, tensord.PrefixCache  # a name of tensord is imported at its first use
    tokens = np.arange(64, dtype=np.uint32)
    held = takes_all_but(free)
    client = client_of(path, timeout_s=PATIENCE_S)
    prefixes = cache_of(client, NAMESPACE, block_tokens=16)
    found = [client.get(key(1)) is None, prefixes.match(tokens) is None, client.get_or_compute(key(3), lambda: 1)]
    put = client.put(key(1), payload(1), wait=True)
    for fd in held:
        os.close(fd)
    again = client.wait_connected(PATIENCE_S) and client.put(key(2), payload(2), wait=True).state
    return found, put.state, type(put.error).__name__, str(put.error), again


@pytest.mark.parametrize("free", [0, 3, 6])
def test_a_client_without_free_descriptors_misses_and_says_the_limit_until_some_are_free(
    daemon: Daemon, free: int
) -> None:
    with Child(has_few_files, daemon.socket, free) as child:
        found, state, error, text, again = child.hear()
    assert found[:2] == [True, True]
    assert (state, error) == ("lost", ProcessLimit.__name__), text
    assert f"its limit is {FILES} (RLIMIT_NOFILE)" in text
    assert again == "stored"


def may_open(daemon: Daemon, files: int) -> None:
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (files, hard))


@pytest.mark.parametrize("free", [0, 2, 5])
def test_a_daemon_without_free_descriptors_serves_the_clients_that_it_has_and_new_ones_once_it_can(
    daemon: Daemon, free: int
) -> None:
    attached = daemon.client()
    assert attached.put(key(1), payload(1), wait=True).state == "stored"
    connection = attached.link.connection
    before, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    may_open(daemon, daemon.descriptors() + free)
    news = [tensord.Client(daemon.socket, timeout_s=0.2) for _ in range(4)]
    assert has(attached, 1)
    assert attached.put(key(2), payload(2), wait=True).state == "stored"
    assert attached.link.connection is connection
    assert daemon.log.count("cannot accept a connection") <= 1
    may_open(daemon, before)
    for client in news:
        until(partial(has_put, client), "a put once the daemon can open files")
        client.close()


def has_put(client: tensord.Client) -> bool:
    return client.put(key(3), payload(3), wait=True).state in ("stored", "existed")


def may_start_no_thread(stage: Stage, path: Path) -> Any:
    client_of, limit = tensord.Client, resource.getrlimit(resource.RLIMIT_NPROC)
    os.setgroups([])
    os.setresgid(QUIET, QUIET, QUIET)
    os.setresuid(QUIET, QUIET, 0)
    os.setresuid(QUIET, QUIET, QUIET)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, limit[1]))
    client = client_of(path, timeout_s=PATIENCE_S)
    put = client.put(key(1), payload(1), wait=True)
    found = [client.get(key(1)) is None, client.connected, put.state, type(put.error).__name__, str(put.error)]
    try:
        client_of(path, required=True)
    except DaemonUnavailable as error:
        found.append(type(error).__name__)
    try:
        client.on_mode(lambda change: None)
    except ProcessLimit as error:
        found.append(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_NPROC, limit)
    return found, client.wait_connected(PATIENCE_S) and client.put(key(2), payload(2), wait=True).state


@pytest.mark.root
@of_root
def test_a_client_that_may_start_no_thread_acts_as_without_a_daemon_until_it_may() -> None:
    with serving() as daemon, Child(may_start_no_thread, daemon.socket) as child:
        (missed, connected, state, error, text, required, mode), again = child.hear()
    assert missed and not connected
    assert (state, error, required, mode) == ("lost", *[ProcessLimit.__name__] * 3)
    assert "can start no thread" in text and "RLIMIT_NPROC" in text
    assert again == "stored"
