"""Real processes under several uids: who takes all that it may leaves the others theirs, and who may not write the ring
has no mapping to do it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.errors import DaemonUnavailable, LimitReached
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, payload
from .raw import RawClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes under other uids")
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


def taken(take: Any) -> tuple[int, str]:
    """How often `take()` went well before it was refused, and the refusal."""
    for number in count():
        try:
            take()
        except LimitReached as refused:
            return number, str(refused)
        assert number < TRIES, "it is never refused"
    raise AssertionError


def all_clients(stage: Stage, uid: int, path: Path) -> None:
    become(uid)
    with ExitStack() as stack:
        stage.tell(taken(lambda: stack.enter_context(RawClient(path, attach=False))))
        stage.hear()


def all_lanes(stage: Stage, uid: int, path: Path) -> None:
    """Takes lanes, and keeps them although it closes the connections."""
    become(uid)
    held: list[int] = []

    def take() -> None:
        client = RawClient(path)
        held.extend(os.dup(fd) for fd in client.fds)
        client.close()

    stage.tell(taken(take))
    stage.hear()


def all_claims(stage: Stage, uid: int, path: Path) -> None:
    become(uid)
    numbers = count()
    with RawClient(path) as one, RawClient(path) as other:

        def take() -> None:
            number = next(numbers)
            (one, other)[number % 2].ask(lambda n: messages.RequestClaim(n, key(number)))

        stage.tell(taken(take))
        stage.hear()


def all_readers(stage: Stage, uid: int, path: Path) -> None:
    become(uid)
    with ExitStack() as stack:

        def take() -> None:
            channel = BlockingChannel.connect(path.with_name("status.sock"), PATIENCE_S, Connection.status_client())
            stack.callback(channel.close)
            with suppress(DaemonUnavailable):
                channel.send(messages.HealthQuery(1), timeout_s=PATIENCE_S)
            answer, _ = channel.receive(PATIENCE_S)
            if isinstance(answer, messages.Error):
                raise answer.to_error()

        stage.tell(taken(take))
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


@pytest.mark.parametrize(
    ("hog", "flags", "most", "named"),
    [
        (all_clients, {"limits_clients_max": 8}, 6, "quotas.limits_share_max = 0.75) of limits.clients_max = 8"),
        (all_lanes, {"limits_lanes_max": 8}, 6, "quotas.limits_share_max = 0.75) of limits.lanes_max = 8"),
        (all_claims, {}, 15, "quotas.limits_share_max = 0.75) of the fixed total = 20"),
        (all_readers, {}, 6, "quotas.limits_share_max = 0.75) of the fixed total = 8"),
    ],
)
def test_a_uid_that_takes_all_it_may_leaves_other_uids_theirs(
    hog: Any, flags: dict[str, object], most: int, named: str
) -> None:
    with serving(TOTALS, **flags) as daemon, Child(hog, LOUD, daemon.socket) as loud:
        taken, refusal = loud.hear()
        assert taken == most
        assert f"uid {LOUD} has" in refusal and named in refusal
        with Child(one_of_all, QUIET, daemon.socket) as quiet:
            assert quiet.hear() == "stored"
        assert sum(daemon.status()["quotas"]["refusals"].values()) == 1
        if hog is all_lanes:
            # The daemon sees the end of a connection a moment later.
            daemon.until(lambda status: counted(status, LOUD) == (most, 0), "its lanes to be left without a client")
        # What it lets go of it may take again.
        loud.tell()
        loud.wait()

        def takes_as_much_again() -> bool:
            with Child(hog, LOUD, daemon.socket) as again:
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


@pytest.mark.parametrize(
    ("write_in_place", "gid"),
    [("owner", OWN_GROUP), ("owner", DAEMONS_GROUP), ("group", OWN_GROUP)],
    ids=["owner", "owner, in the daemon's group", "group, in another group"],
)
def test_large_payloads_of_a_uid_that_may_not_write_the_ring_are_stored_through_its_inbox(
    write_in_place: str, gid: int
) -> None:
    assert stored_by_another_uid(write_in_place, gid) == ({"r--s"}, 1)
